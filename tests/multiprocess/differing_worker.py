"""One process of test_configuration.py: ``PORT PROCESS_ID WHAT``. Process 1 differs in WHAT."""

import os
import signal
import sys

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr


def main() -> None:
    port, rank, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    # The process that does not find out first waits for the other; it ends at the latest now.
    signal.alarm(100)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    differs = rank == 1
    settings = {"seed": {"seed": 7 if differs else 0}, "nothing": {}}[what]
    tx = sr.skipreduce("data", 0.5, **settings)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("data"))
    grads = {"w": jax.make_array_from_callback((2, 2000), sharding, lambda _: np.ones((1, 2000), np.float32))}

    def step(grads):
        return tx.update(jax.tree.map(lambda leaf: leaf[0], grads), sr.SkipReduceState(jnp.int32(0)))[0]

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P()))
    jax.block_until_ready(mapped(grads))
    print("done", flush=True)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main()
