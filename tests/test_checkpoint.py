"""Orbax checkpoints in the middle of a run: resuming gives the bits of the run that was not interrupted."""

import functools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._gradients.ratio import num_steps_of
from tests.helpers import bits, data_mesh
from tests.multiprocess.test_gloo import free_port

pytestmark = pytest.mark.promotes

ROOT = Path(__file__).parent.parent
SAVED_AT, LAST = 3, 6
SETTINGS = {
    "random": {"skip_ratio": 0.5},
    "schedule": {"skip_ratio": optax.linear_schedule(0.0, 0.75, 5), "normalize": "drop"},
    "dropout": {"skip_ratio": 0.5, "mode": "dropout"},
    "wire": {"skip_ratio": 0.5, "wire_dtype": "bfloat16"},
    "protected": {"skip_ratio": 0.75, "protect": sr.by_path("out"), "bucket_bytes": 64},
}


class Run:
    """A training on `num_workers` CPU devices, made anew as by a program that has just been started."""

    def __init__(self, num_workers: int, settings: dict, dtype=jnp.float32):
        self.num_workers = num_workers
        self.mesh = data_mesh(num_workers)
        tx = optax.chain(sr.skipreduce("data", min_size=8, seed=5, **settings), optax.adam(1e-2))
        rng = np.random.default_rng(0)
        # Sizes that no number of workers divides, and one leaf under min_size.
        params = {
            "in": jnp.asarray(rng.normal(size=(7, 11)), dtype),
            "out": jnp.asarray(rng.normal(size=(11, 3)), dtype),
            "bias": jnp.zeros(3, dtype),
        }
        # Where a step leaves its results: restored arrays go there, too, and nothing compiles twice.
        self.state = jax.device_put((params, tx.init(params)), NamedSharding(self.mesh, P()))

        def loss_fn(params, batch):
            return jnp.mean((jnp.tanh(batch @ params["in"]) @ params["out"] + params["bias"] - 1) ** 2)

        @jax.jit
        @functools.partial(jax.shard_map, mesh=self.mesh, in_specs=(P(), P("data")), out_specs=P())
        def step(state, batch):
            params, opt_state = state
            _, grads = sr.local_value_and_grad(loss_fn, "data")(params, batch)
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        self.step = step

    def train(self, first: int, last: int) -> None:
        for number in range(first, last):
            # A function of the step, as data has to be for this: the library's own state is its counter.
            batch = np.random.default_rng(number).normal(size=(4 * self.num_workers, 7)).astype(np.float32)
            dtype = self.state[0]["in"].dtype
            self.state = jax.block_until_ready(self.step(self.state, jnp.asarray(batch, dtype)))

    def template(self):
        return jax.tree.map(ocp.utils.to_shape_dtype_struct, self.state)

    @property
    def count(self) -> int:
        return int(self.state[1][0].num_reductions)

    def bits(self) -> dict[str, bytes]:
        return {jax.tree_util.keystr(path): bits(leaf) for path, leaf in jax.tree.leaves_with_path(self.state)}


def save(folder: Path, step: int, state) -> None:
    with ocp.CheckpointManager(folder) as manager:
        manager.save(step, args=ocp.args.StandardSave(state))


def restore(folder: Path, run: Run) -> int:
    """Sets the state of `run` to the last checkpoint; returns its step."""
    with ocp.CheckpointManager(folder) as manager:
        step = manager.latest_step()
        assert step is not None
        run.state = manager.restore(step, args=ocp.args.StandardRestore(run.template()))
    return step


CASES = [*((name, "float32") for name in SETTINGS), ("random", "bfloat16")]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_resumes_to_the_same_bits(name, dtype, tmp_path):
    dtype = jnp.dtype(dtype)
    through = Run(8, SETTINGS[name], dtype)
    through.train(0, SAVED_AT)
    save(tmp_path, SAVED_AT, through.state)
    through.train(SAVED_AT, LAST)

    resumed = Run(8, SETTINGS[name], dtype)
    first = restore(tmp_path, resumed)
    assert (first, resumed.count) == (SAVED_AT, SAVED_AT)
    resumed.train(first, LAST)
    assert resumed.count == LAST
    assert resumed.bits() == through.bits()
    # Arrays are where a step wants them: one program, compiled once.
    assert resumed.step._cache_size() == 1


def test_the_counter_belongs_into_the_checkpoint():
    """Without it the shifts of the first steps come again. (And the test above would see that.)"""
    through, forgetful = Run(8, SETTINGS["random"]), Run(8, SETTINGS["random"])
    through.train(0, SAVED_AT)
    params, opt_state = through.state
    counter = jax.tree.map(jnp.zeros_like, opt_state[0])
    forgetful.state = (params, (counter, *opt_state[1:]))
    through.train(SAVED_AT, LAST)
    forgetful.train(SAVED_AT, LAST)
    assert forgetful.bits() != through.bits()


@pytest.mark.parametrize("num_workers", [1, 3])
def test_restores_at_another_number_of_workers(num_workers, tmp_path):
    saved = Run(8, SETTINGS["random"])
    saved.train(0, SAVED_AT)
    save(tmp_path, SAVED_AT, saved.state)

    resumed = Run(num_workers, SETTINGS["random"])
    restore(tmp_path, resumed)
    assert resumed.bits() == saved.bits()  # the state knows nothing of N,
    assert resumed.count == SAVED_AT
    # and what follows is what a run at this N does from here: shifts drawn modulo N, k = round(ratio * N).
    fresh = Run(num_workers, SETTINGS["random"])
    fresh.state = jax.device_put(jax.tree.map(np.asarray, saved.state), NamedSharding(fresh.mesh, P()))
    resumed.train(SAVED_AT, LAST)
    fresh.train(SAVED_AT, LAST)
    assert resumed.bits() == fresh.bits()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(resumed.state))


def test_the_table_of_k_in_the_docs():
    text = (ROOT / "docs" / "failures.md").read_text()
    rows = {
        name: re.search(rf"\| {re.escape(name)} \| (.*) \|", text)[1].split(" | ")
        for name in ("N", "k", "left out, k/N")
    }
    assert len(rows["N"]) == 8
    for num_workers, steps, share in zip(*rows.values(), strict=True):
        k = num_steps_of(0.5, int(num_workers))
        assert (int(steps), float(share)) == (k, round(k / int(num_workers), 2))


@pytest.mark.multiprocess
def test_two_processes_resume_to_the_same_bits(tmp_path):
    def run(task: str) -> list[dict[str, np.ndarray]]:
        port, outs = free_port(), [tmp_path / f"{task}{rank}.npz" for rank in range(2)]
        arguments = [str(tmp_path / "checkpoints"), task]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1"}
        workers = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.multiprocess.checkpoint_worker", str(port), str(rank), *arguments, out],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank, out in enumerate(outs)
        ]
        try:
            for worker in workers:
                output, _ = worker.communicate(timeout=120)
                assert worker.returncode == 0, output
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return [dict(np.load(out)) for out in outs]

    through, resumed = run("through"), run("resume")
    for results in (through, resumed):
        for name, value in results[0].items():
            np.testing.assert_array_equal(results[1][name], value, err_msg=f"{name} differs between processes")
    assert set(through[0]) == set(resumed[0])
    for name, value in through[0].items():
        np.testing.assert_array_equal(resumed[0][name], value, err_msg=name)
    assert resumed[0]["[1][0].num_reductions"] == LAST


# Saves for ever: step s holds the value s everywhere. 64 MiB, so that a save takes a while.
SAVE_FOR_EVER = """
import sys
import jax, numpy as np, orbax.checkpoint as ocp
jax.config.update("jax_platforms", "cpu")
with ocp.CheckpointManager(sys.argv[1], options=ocp.CheckpointManagerOptions(max_to_keep=2)) as manager:
    for step in range(1, 10**6):
        tree = {f"w{i}": np.full(2**20, step, np.float32) for i in range(16)}
        manager.save(step, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
"""


def test_a_process_killed_while_it_saves_leaves_the_last_checkpoint_whole(tmp_path):
    def complete() -> list[int]:
        return [int(path.name) for path in tmp_path.iterdir() if path.name.isdecimal()]

    def half_written() -> list[Path]:
        return [path for path in tmp_path.iterdir() if "tmp" in path.name]

    # It is killed at a moment of chance; a save that was in the middle is what counts.
    for _ in range(5):
        process = subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 100
        try:
            done = set(complete())
            while not (set(complete()) - done and half_written()):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.001)
        finally:
            process.kill()
            assert process.wait() == -signal.SIGKILL
        if half_written():
            break
    else:
        pytest.fail("was never killed in the middle of a save")

    template = {f"w{i}": jax.ShapeDtypeStruct((2**20,), np.float32) for i in range(16)}
    with ocp.CheckpointManager(tmp_path) as manager:
        step = manager.latest_step()
        assert step is not None
        assert step == max(complete())
        restored = manager.restore(step, args=ocp.args.StandardRestore(template))
        assert all((np.asarray(leaf) == step).all() for leaf in restored.values())
        # The half-written one is in nobody's way: the next process writes that step again.
        tree = {f"w{i}": np.full(2**20, step + 1, np.float32) for i in range(16)}
        manager.save(step + 1, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        assert manager.latest_step() == step + 1
