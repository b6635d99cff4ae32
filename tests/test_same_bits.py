"""The bits that the library gives, by their hashes: a change of the house changes none of them.

`python -m tests.test_same_bits` records them anew, which is right only where a change of numbers is meant. Inputs are
integers times powers of two with many digits, so that an order of additions shows in the sums.
"""

import functools
import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr

RECORD = Path(__file__).parent / "same_bits.json"


def values(shape, dtype="float32", seed=0):
    rng = np.random.default_rng([seed, *shape])
    if np.dtype(jnp.dtype(dtype)).kind in "iu":
        return jnp.asarray(rng.integers(0, 13, shape).astype(dtype))
    x = rng.normal(size=shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.normal(size=shape)
    return jnp.asarray(x.astype(jnp.dtype(dtype)))


def mesh_of(shape, names):
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def on_workers(function, num_workers, x, *shared):
    """`function` of (own row, *shared) on each worker, stacked by rank."""
    mesh = mesh_of((num_workers,), ("data",))

    def local(x, *shared):
        return jax.tree.map(lambda leaf: leaf[None], function(jax.tree.map(lambda leaf: leaf[0], x), *shared))

    specs = (P("data"), *[P()] * len(shared))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data")))(x, *shared)


def all_reduces(num_workers, dtype, size, wire_dtype=None, backend="xla"):
    for k in sorted({0, 1 % num_workers, num_workers // 2, num_workers - 1}):
        for normalize in ("skip", "drop", None):
            options = {"normalize": normalize, "wire_dtype": wire_dtype, "backend": backend}
            reduce = functools.partial(sr.all_reduce, axis_name="data", **options)
            x = values((num_workers, size), dtype)
            yield f"k={k} {normalize}", on_workers(lambda x: reduce(x, num_skipped=k, shift=2), num_workers, x)  # noqa: B023
        traced = on_workers(
            lambda x, k, c: reduce(x, num_skipped=k, shift=c),  # noqa: B023
            *(num_workers, x, jnp.int32(k), jnp.int32(-3)),
        )
        yield f"k={k} traced", traced


def other_collectives(num_workers):
    x = values((num_workers, 1001))
    key = jax.random.key(7)
    for normalize in ("skip", "drop"):
        dropout = functools.partial(sr.all_reduce, axis_name="data", mode="dropout", normalize=normalize)
        yield f"dropout {normalize}", on_workers(lambda x, key: dropout(x, num_skipped=2, key=key), num_workers, x, key)  # noqa: B023
    yield "gather skipped", on_workers(lambda x: sr.all_reduce(x, "data", num_gather_skipped=2), num_workers, x)
    yield "scatter", on_workers(lambda x: sr.reduce_scatter(x, "data", num_skipped=1, shift=1), num_workers, x)
    yield "gather", on_workers(lambda x: sr.all_gather(x, "data", shift=1, wire_dtype="bfloat16"), num_workers, x)
    scatter = functools.partial(sr.reduce_scatter, axis_name="data", num_skipped=1, wire_dtype="float16")
    yield "scatter float16", on_workers(scatter, num_workers, x)


def gradients(rows):
    lead = (rows,) if rows else ()
    shapes = {
        "embed": ((40, 33), "float32"),
        "layer": {"kernel": ((37, 41), "float32"), "bias": ((41,), "float32"), "half": ((2049,), "bfloat16")},
        "scale": ((), "float32"),
        "steps": ((5,), "int32"),
        "z": ((1500,), "float32"),
    }
    is_shape = lambda x: isinstance(x, tuple)  # noqa: E731
    flat, treedef = jax.tree.flatten(shapes, is_leaf=is_shape)
    return jax.tree.unflatten(
        treedef, [values((*lead, *shape), dtype, seed) for seed, (shape, dtype) in enumerate(flat)]
    )


def state_at(tx, params, step):
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, step), tx.init(params))


def transformations(**arguments):
    axis_name = arguments.pop("axis_name", "data")
    tx = sr.skipreduce(axis_name, **arguments)
    grads = gradients(8)
    params = jax.tree.map(lambda leaf: leaf[0], grads)
    for step in (0, 5):
        state = state_at(tx, params, step)
        yield f"step {step}", on_workers(lambda g, state: tx.update(g, state)[0], 8, grads, state)


def two_networks():
    mesh = mesh_of((2, 4), ("node", "gpu"))
    tx = sr.skipreduce("gpu", 0.5, fast_axes="node", backend="xla")
    grads = gradients(8)
    state = state_at(tx, jax.tree.map(lambda leaf: leaf[0], grads), 3)

    def local(g, state):
        return tx.update(jax.tree.map(lambda leaf: leaf[0], g), state)[0]

    specs = (P(("node", "gpu")), P())
    yield "means", jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()))(grads, state)


def stacked(backend="xla"):
    mesh = mesh_of((4, 2), ("data", "model"))
    specs = {"w": P(None, "model"), "v": P()}
    tx = sr.skipreduce("data", 0.5, mesh=mesh, param_specs=specs, backend=backend)
    params = {"w": jnp.zeros((34, 66)), "v": jnp.zeros(1100)}
    grads = {"w": values((4, 34, 66)), "v": values((4, 1100))}
    yield "means", jax.jit(lambda g, s: tx.update(g, s, params)[0])(grads, state_at(tx, params, 2))


def gathers(**arguments):
    shards, other = values((8, 13)), values((8, 8 * 13), seed=3)

    def whole(shard, other):
        return jax.value_and_grad(lambda shard: jnp.sum(other * sr.fsdp_gather(shard, "data", **arguments)))(shard)

    yield "value and gradient", on_workers(lambda both: whole(*both), 8, (shards, other))


RATIOS = {"embed": 0.25, "layer": {"kernel": 0.5, "bias": 0.5, "half": 0.75}, "scale": 0.0, "steps": 0.0, "z": 0.5}

CASES = {
    **{
        f"all_reduce {n} {dtype}": functools.partial(all_reduces, n, dtype, 1003)
        for n, dtype in (
            *((1, "float32"), (2, "float32"), (3, "float32"), (5, "float32"), (8, "float32")),
            *((8, "bfloat16"), (8, "float16"), (3, "complex64"), (4, "int32"), (4, "int8")),
        )
    },
    "all_reduce 8 large": functools.partial(all_reduces, 8, "float32", 2**18 + 5),
    "all_reduce 8 sent as bfloat16": functools.partial(all_reduces, 8, "float32", 1003, "bfloat16"),
    "all_reduce 4 native": functools.partial(all_reduces, 4, "float32", 1003, None, "auto"),
    "other collectives 5": functools.partial(other_collectives, 5),
    "skipreduce half": functools.partial(transformations, skip_ratio=0.5, backend="xla"),
    "skipreduce native": functools.partial(transformations, skip_ratio=0.5, backend="auto"),
    "skipreduce static": functools.partial(transformations, skip_ratio=0.5, mode="static"),
    "skipreduce drop": functools.partial(transformations, skip_ratio=0.3, normalize="drop", seed=11),
    "skipreduce dropout": functools.partial(transformations, skip_ratio=0.5, mode="dropout"),
    "skipreduce nothing": functools.partial(transformations, skip_ratio=0.0),
    "skipreduce schedule": functools.partial(
        transformations, skip_ratio=optax.linear_schedule(0.0, 0.75, 10), wire_dtype="bfloat16"
    ),
    "skipreduce by leaf": functools.partial(transformations, skip_ratio=RATIOS, protect=sr.by_path("^z$")),
    "skipreduce many buckets": functools.partial(transformations, skip_ratio=0.5, bucket_bytes=6000, min_size=1),
    "two networks": two_networks,
    "stacked": stacked,
    "fsdp whole": gathers,
    "fsdp skipped": functools.partial(gathers, num_gather_skipped=2, num_skipped=3, step=3, wire_dtype="bfloat16"),
}


def digest(case):
    found = {}
    for name, result in case():
        hashed = hashlib.sha256()
        for path, leaf in jax.tree_util.tree_flatten_with_path(result)[0]:
            array = np.asarray(leaf)
            hashed.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode() + array.tobytes())
        found[name] = hashed.hexdigest()[:16]
    return found


@pytest.mark.parametrize("name", CASES)
def test_same_bits(name):
    assert digest(CASES[name]) == json.loads(RECORD.read_text())[name]


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    RECORD.write_text(json.dumps({name: digest(case) for name, case in CASES.items()}, indent=1) + "\n")
