"""skipreduce against lax.pmean where there is no network: one process, 8 CPU devices.

XLA's psum inside one process reads its peers' memory; a ring copies each slice from worker to worker. So this
shows the price of the ring's copies, not what it saves: on a link that takes time, bytes decide.

    python benchmarks/overhead.py --json benchmarks/overhead.json
"""

import argparse
import functools

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
        name: jax.device_put(rng.normal(size=(8, *shape)).astype(np.float32), NamedSharding(mesh, P("data")))
        for name, shape in shapes.items()
    }

    def candidate(reduce):
        @jax.jit
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P())
        def run(stacked):
            return reduce(jax.tree.map(lambda leaf: leaf[0], stacked))

        return functools.partial(run, grads)

    def skip(num_skipped: int, mode: str):
        tx = sr.skipreduce("data", num_skipped / 8, mode=mode)  # pyright: ignore[reportArgumentType]
        return candidate(lambda local: tx.update(local, sr.SkipReduceState(jnp.int32(1)))[0])

    candidates = {"lax.pmean": candidate(lambda local: lax.pmean(local, "data"))}
    candidates |= {f"k={k} {mode}": skip(k, mode) for k in (0, 2, 4, 6) for mode in ("random", "static")}

    # Right before fast: with nothing skipped, the result is the mean.
    expected = jax.tree.map(lambda leaf: np.asarray(leaf).mean(0), grads)
    for name in ("lax.pmean", "k=0 random"):
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
    print(f"{'':<14}{'p50 ms':>9}{'p99 ms':>9}   times lax.pmean")
    for name, row in rows.items():
        print(f"{name:<14}{row['p50_ms']:9.1f}{row['p99_ms']:9.1f}{row['ratio']:18.2f}")
    common.write_json(args.json, {"machine": common.machine(), "bytes": num_bytes, "rounds": args.rounds, "rows": rows})


if __name__ == "__main__":
    main()
