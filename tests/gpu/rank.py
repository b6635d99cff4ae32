"""One worker of the checks on a GPU: started by launch.py, N times."""

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr


def load_oracle():
    """`by_reference` of tests/helpers.py, whatever else is called tests where this runs."""
    path = Path(__file__).parents[1] / "helpers.py"
    spec = importlib.util.spec_from_file_location("helpers", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.by_reference


class Worker:
    """This process among N that have a device each."""

    def __init__(self, arguments):
        jax.distributed.initialize(arguments.coordinator, arguments.workers, arguments.rank)
        self.rank, self.size, self.backend = arguments.rank, arguments.workers, arguments.backend
        assert jax.device_count() == self.size, jax.devices()
        self.mesh = jax.make_mesh((self.size,), ("data",), axis_types=(AxisType.Auto,))
        self.flag = Path(arguments.flag)
        # Which row of an array over the workers is this process's: ranks are those of the mesh.
        self.row = [device.process_index for device in self.mesh.devices.flat].index(jax.process_index())

    def share(self, rows: np.ndarray) -> jax.Array:
        """An array whose row r lies on worker r. All processes give the same rows, or the same shape of them."""
        sharding = NamedSharding(self.mesh, P("data"))
        return jax.make_array_from_callback(rows.shape, sharding, lambda index: rows[index])

    def compiled(self, function, *shared_specs):
        """`function` of (this worker's array, *shared), jitted."""

        def local(x, *shared):
            return function(x[0], *shared)[None]

        return jax.jit(jax.shard_map(local, mesh=self.mesh, in_specs=(P("data"), *shared_specs), out_specs=P("data")))

    def own(self, array: jax.Array) -> np.ndarray:
        return np.asarray(array.addressable_shards[0].data)[0]

    def say(self, text: str) -> None:
        print(text, flush=True)


def rows(size: int, num_elements: int, dtype) -> np.ndarray:
    values = np.random.default_rng(size + num_elements).normal(size=(size, num_elements))
    return np.asarray(jnp.asarray(values, jnp.dtype(dtype)))


def check_correct(worker: Worker, sizes, shifts) -> None:
    """All k, several shifts and dtypes, against the oracle, bit by bit."""
    by_reference = load_oracle()
    cases = [("float32", None), ("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", None), ("float16", None)]
    num_checked = 0
    for dtype, wire_dtype in cases:
        for k in range(worker.size):
            reduce = worker.compiled(
                lambda x, c, k=k, wire_dtype=wire_dtype: sr.all_reduce(
                    x, "data", num_skipped=k, shift=c, normalize=None, wire_dtype=wire_dtype, backend=worker.backend
                ),
                P(),
            )
            for num_elements in sizes:
                x = rows(worker.size, num_elements, dtype)
                shared = worker.share(x)
                for c in shifts:
                    result = worker.own(reduce(shared, jnp.int32(c)))
                    accumulator = np.float32 if dtype != "float32" else None
                    expected = by_reference(x, k, c, accumulator=accumulator, wire_dtype=wire_dtype)[worker.row]
                    wrong = int(np.sum(result.view(np.uint8) != expected.view(np.uint8)))
                    if wrong:
                        raise SystemExit(
                            f"wrong: {wrong} bytes of {expected.nbytes}, {dtype} sent as {wire_dtype}, k={k}, c={c}, "
                            f"{num_elements} elements: {result[:4]} expected {expected[:4]}"
                        )
                    num_checked += 1
    # Back to back, and with a mean.
    x = rows(worker.size, 1000, "float32")
    mean = worker.compiled(lambda x: sr.all_reduce(x, "data", num_skipped=0, backend=worker.backend))
    shared = worker.share(x)
    for _ in range(100):
        result = mean(shared)
    np.testing.assert_allclose(worker.own(result), by_reference(x, 0, 0)[worker.row] / worker.size, rtol=1e-6)
    worker.say("JSON " + json.dumps({"workers": worker.size, "checked": num_checked, "result": "bitwise equal"}))


def check_small(worker: Worker) -> None:
    """Little enough for a tool that slows everything down."""
    check_correct(worker, sizes=(1003,), shifts=(1,))


def check_timing(worker: Worker, mebibytes, repeats: int) -> None:
    """What is compared runs in turns. N workers on one GPU share its time: compare the rows of one run, no more."""
    for mib in mebibytes:
        num_elements = mib * 2**18
        shared = worker.share(np.ones((worker.size, num_elements), np.float32))
        candidates = {"lax.psum": lambda x: jax.lax.psum(x, "data")}
        for k in sorted({0, worker.size // 2, worker.size - 1}):
            for backend in dict.fromkeys(("xla", worker.backend)):
                name = f"{'ppermute' if backend == 'xla' else os.environ['SKIPREDUCE_ALGORITHM']} k={k}"
                candidates[name] = lambda x, k=k, backend=backend: sr.all_reduce(
                    x, "data", num_skipped=k, normalize=None, backend=backend
                )
        runs = {name: worker.compiled(function) for name, function in candidates.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for name, run in runs.items():
            result = worker.own(run(shared))
            k = int(name.rpartition("=")[2]) if "=" in name else 0
            np.testing.assert_array_equal(result, np.float32(worker.size - k), name)
        for _ in range(repeats):
            for name, run in runs.items():
                start = time.perf_counter()
                run(shared).block_until_ready()
                times[name].append(time.perf_counter() - start)
        for name, values in times.items():
            figures = {"workers": worker.size, "mib": mib, "what": name, "repeats": repeats}
            figures |= {f"p{q}_us": round(1e6 * float(np.percentile(values, q)), 1) for q in (50, 99)}
            figures["device"] = jax.devices()[0].device_kind
            worker.say("JSON " + json.dumps(figures))


def check_time_limit(worker: Worker) -> None:
    """A worker that does not come: NaN for the others, and an error at the next call."""
    x = worker.share(np.ones((worker.size, 1000), np.float32))
    reduce = worker.compiled(lambda x: sr.all_reduce(x, "data", normalize=None, backend=worker.backend))
    assert worker.own(reduce(x))[0] == worker.size
    if worker.rank == 0:
        assert np.isnan(worker.own(reduce(x))).all(), "no NaN where a worker did not come"
        message = "no error"
        try:
            worker.own(reduce(x))
        except Exception as error:
            message = str(error)
        if "did not come within the time limit" not in message:
            raise SystemExit(f"after a worker did not come, the next call gave: {message}")
        worker.say("the error came as it should")
        worker.flag.touch()
    while not worker.flag.exists():
        time.sleep(0.1)
    sys.stdout.flush()
    os._exit(0)  # not through a shutdown that the workers would make together


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--flag", required=True)
    arguments = parser.parse_args()
    worker = Worker(arguments)
    if arguments.backend == "xla":  # the dry run
        checks = {
            "correct": lambda: check_correct(worker, sizes=(7, 1001), shifts=(0, 3)),
            "timing": lambda: check_timing(worker, mebibytes=(1,), repeats=2),
        }
    else:
        large = 3 * 2**20 + 1
        checks = {
            "correct": lambda: check_correct(worker, sizes=(1, 1003, 65536, large), shifts=(0, 1, -7)),
            "timing": lambda: check_timing(worker, mebibytes=(16, 256), repeats=10),
            "time_limit": lambda: check_time_limit(worker),
            "small": lambda: check_small(worker),
        }
    checks[arguments.what]()
    worker.say("ok")


if __name__ == "__main__":
    main()
