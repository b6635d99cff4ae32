"""What is compared between one process with N devices and N processes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr


def local_values(num_workers: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "kernel": rng.normal(size=(num_workers, 33, 40)).astype(np.float32),
        "half": np.asarray(jnp.asarray(rng.normal(size=(num_workers, 1500)), jnp.bfloat16)),
        "bias": rng.normal(size=(num_workers, 40)).astype(np.float32),
        "steps": rng.integers(0, 100, size=(num_workers, 7)).astype(np.int32),
    }


def run_all(num_workers: int) -> dict[str, np.ndarray]:
    """Results by name, as this process sees them (they are the same for all workers)."""
    mesh = jax.make_mesh((num_workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_workers])
    sharding = NamedSharding(mesh, P("data"))
    stacked = {
        name: jax.make_array_from_callback(values.shape, sharding, lambda index, values=values: values[index])
        for name, values in local_values(num_workers).items()
    }

    def run(function, check_vma=True):
        mapped = jax.shard_map(
            lambda x: function(jax.tree.map(lambda leaf: leaf[0], x)),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            check_vma=check_vma,
        )
        return jax.jit(mapped)(stacked)

    schedule = optax.linear_schedule(0.0, 0.75, 4)
    candidates = {
        "pmean": lambda g: jax.tree.map(lambda x: lax.pmean(x, "data"), g),
        "full": lambda g: updates(g, 0.0, 0),
        "half": lambda g: updates(g, 0.5, 3),
        "scheduled": lambda g: updates(g, schedule, 3),
        "drop": lambda g: updates(g, 0.5, 5, normalize="drop"),
        "dropout": lambda g: updates(g, 0.5, 5, mode="dropout"),
        "buckets": lambda g: updates(g, 0.5, 1, bucket_bytes=1, min_size=0),
    }
    results = {}
    for name, function in candidates.items():
        for check_vma in (True, False) if name == "half" else (True,):
            for leaf, value in run(function, check_vma).items():
                local = np.asarray(value.addressable_data(0))
                # NumPy's files do not know bfloat16.
                results[f"{name}/{leaf}/{check_vma}"] = local.view(np.uint16) if leaf == "half" else local
    return results


def updates(grads, ratio, count, **settings):
    tx = sr.skipreduce("data", ratio, **settings)
    return tx.update(grads, sr.SkipReduceState(jnp.int32(count)))[0]
