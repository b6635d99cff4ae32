"""Time to compile an update, and the size of its program, for 8, 64 and 256 workers.

Up to 16 steps of the ring stand in the program one by one, more become a loop, so neither grows with the number of
workers from there on.

    python benchmarks/compile_time.py --json benchmarks/compile_time.json
"""

import argparse
import time

import common
import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from overhead import gradient_tree

import jax_skipreduce as sr


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    common.use_cpu_devices(max(args.workers))
    shapes = gradient_tree(16 * 2**20)

    def reductions():
        def skip(ratio):
            tx = sr.skipreduce("data", ratio, backend="xla")
            return lambda grads: tx.update(grads, sr.SkipReduceState(jnp.int32(1)))[0]

        yield "lax.pmean", lambda grads: lax.pmean(grads, "data")
        yield "k=0", skip(0.0)
        yield "k=N/2", skip(0.5)
        yield "k traced", skip(lambda count: 0.5 * jnp.minimum(count, 1))

    rows = []
    print(f"{len(shapes)} leaves, 16 MiB of float32; {common.machine()}")
    print(f"{'workers':>8}  {'':<10}{'trace+lower s':>14}{'compile s':>11}{'HLO lines':>11}")
    for num_workers in args.workers:
        mesh = jax.make_mesh(
            (num_workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_workers]
        )
        for name, reduce in reductions():

            def run(stacked, reduce=reduce, mesh=mesh):
                local = jax.shard_map(
                    lambda s: reduce(jax.tree.map(lambda leaf: leaf[0], s)),
                    mesh=mesh,
                    in_specs=P("data"),
                    out_specs=P(),
                )
                return local(stacked)

            grads = {name: jax.ShapeDtypeStruct((num_workers, *shape), jnp.float32) for name, shape in shapes.items()}
            start = time.perf_counter()
            lowered = jax.jit(run).lower(grads)
            traced = time.perf_counter()
            compiled = lowered.compile()
            end = time.perf_counter()
            text = compiled.as_text() or ""
            num_lines = sum(" = " in line for line in text.splitlines())
            row = {"workers": num_workers, "reduction": name, "trace_s": traced - start, "compile_s": end - traced}
            rows.append(row | {"hlo_lines": num_lines})
            times = f"{row['trace_s']:14.2f}{row['compile_s']:11.2f}"
            print(f"{num_workers:8d}  {name:<10}{times}{num_lines:11d}", flush=True)
    common.write_json(args.json, {"machine": common.machine(), "rows": rows})


if __name__ == "__main__":
    main()
