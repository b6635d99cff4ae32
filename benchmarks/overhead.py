"""skipreduce against lax.pmean where there is no network: one process, 8 CPU devices.

XLA's psum inside one process reads its peers' memory; a ring copies each slice from worker to worker. So this
shows the price of the ring's copies, not what it saves: on a link that takes time, bytes decide. The native
kernels read their peers' memory, too. "In place" gives the gradients away (``donate_argnums``), as in a training
step, where nobody needs them any more; else XLA copies them first.

    python benchmarks/overhead.py --json benchmarks/overhead.json
"""

import argparse
import functools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr


def gradient_tree(num_bytes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a small transformer's gradients with `num_bytes` of float32 in all, some not divisible by 8."""
    width = 256
    shapes: dict[str, tuple[int, ...]] = {"embedding": (4001, width)}
    layer = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    left, number = num_bytes // 4 - 4001 * width, 0
    while left > 0:
        for name, shape in layer.items():
            rows = min(shape[0], -(-left // shape[1]))
            if rows <= 0:
                break
            shapes[f"layer{number}/{name}"] = (rows, shape[1])
            left -= rows * shape[1]
        shapes[f"layer{number}/norm"] = (width,)
        number += 1
    return shapes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=41)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    common.use_cpu_devices(8)

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    shapes = gradient_tree(int(args.mebibytes * 2**20))
    grads = {
        name: jax.device_put(
            rng.normal(size=(8 * shape[0], *shape[1:])).astype(np.float32), NamedSharding(mesh, P("data"))
        )
        for name, shape in shapes.items()
    }

    def mean(local):
        return lax.pmean(local, "data")

    def candidate(reduce):
        run = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P()))
        return functools.partial(run, grads)

    def in_place(reduce):
        mapped = jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
        run = jax.jit(mapped, donate_argnums=0)
        held = jax.tree.map(jnp.copy, grads)

        def again():
            nonlocal held
            held = run(held)
            return held

        return again

    def skip(num_skipped: int, mode: str = "random", backend: str = "xla"):
        options: dict[str, Any] = {"mode": mode, "backend": backend}
        tx = sr.skipreduce("data", num_skipped / 8, **options)
        return lambda local: tx.update(local, sr.SkipReduceState(jnp.int32(1)))[0]

    skips = (0, 2, 4, 6)
    candidates = {"lax.pmean": candidate(mean), "lax.pmean, in place": in_place(mean)}
    candidates |= {
        f"ring k={k} {mode}": candidate(skip(k, mode)) for k in (0, 2, 4, 6) for mode in ("random", "static")
    }
    print(sr.native_info())
    if sr.native_info().cpu is None:
        for k in skips:
            candidates[f"native k={k}"] = candidate(skip(k, backend="native"))
            candidates[f"native k={k}, in place"] = in_place(skip(k, backend="native"))
            candidates[f"all_reduce k={k}"] = candidate(
                functools.partial(
                    jax.tree.map, functools.partial(sr.all_reduce, axis_name="data", num_skipped=k, backend="native")
                )
            )

    # Right before fast: with nothing skipped, the result is the mean.
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).reshape(8, -1, *leaf.shape[1:]).mean(0), grads)
    for name in [name for name in candidates if "k=0" in name and "in place" not in name]:
        errors = jax.tree.map(
            lambda got, mean: float(np.abs(np.asarray(got) - mean).max()), candidates[name](), expected
        )
        if max(errors.values()) > 1e-5:
            raise SystemExit(f"{name} is not the mean: off by {errors}")

    seconds = common.interleaved(candidates, args.rounds)
    base = seconds["lax.pmean"]
    rows = {
        name: {
            "p50_ms": float(np.median(times) * 1e3),
            "p99_ms": float(np.percentile(times, 99) * 1e3),
            "ratio": float(np.median(times / base)),
        }
        for name, times in seconds.items()
    }
    num_bytes = sum(4 * int(np.prod(shape)) for shape in shapes.values())
    print(f"{len(shapes)} leaves, {num_bytes / 2**20:.1f} MiB of float32, 8 CPU devices, {args.rounds} rounds")
    print(f"{common.machine()}")
    print(f"{'':<24}{'p50 ms':>9}{'p99 ms':>9}   times lax.pmean")
    for name, row in rows.items():
        print(f"{name:<24}{row['p50_ms']:9.1f}{row['p99_ms']:9.1f}{row['ratio']:18.2f}")
    common.write_json(args.json, {"machine": common.machine(), "bytes": num_bytes, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
