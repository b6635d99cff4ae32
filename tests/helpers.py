"""Ways to run N workers, and the oracle."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jax_skipreduce import SkipReduceState
from jax_skipreduce._topologies import reference as _reference
from jax_skipreduce._topologies.ring import RING

# Every way in which the library is run inside one process.
RUNNERS = ("shard_map", "shard_map_unchecked", "vmap", "pmap")


def slow(*case):
    """A case of ``parametrize`` that ``.ci/run`` runs and the README's command does not."""
    return pytest.param(*case, marks=pytest.mark.slow)


def with_runners(cases):
    """(runner, case): every case under shard_map and vmap, which take different ways; the last one under all runners.

    To the library, pmap and ``check_vma=False`` are a shard_map whose values have no type that says where they vary.
    """
    first = itertools.product(("shard_map", "vmap"), cases)
    return [*first, *((runner, cases[-1]) for runner in ("shard_map_unchecked", "pmap"))]


def data_mesh(num_workers: int) -> Mesh:
    return jax.make_mesh((num_workers,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_workers])


def each_worker(runner: str, function, num_workers: int):
    """`function` of (local value, *shared) -> jitted function of (values stacked by rank, *shared).

    The result holds what each worker got, stacked by rank.
    """
    if runner == "vmap":
        return jax.jit(
            lambda x, *shared: jax.vmap(lambda x: function(x, *shared), axis_name="data", axis_size=num_workers)(x)
        )
    if runner == "pmap":
        return lambda x, *shared: jax.pmap(
            function,
            axis_name="data",
            in_axes=(0, *[None] * len(shared)),
            devices=jax.devices()[:num_workers],
        )(x, *shared)

    def local(x, *shared):
        result = function(jax.tree.map(lambda leaf: leaf[0], x), *shared)
        return jax.tree.map(lambda leaf: leaf[None], result)

    def mapped(x, *shared):
        return jax.shard_map(
            local,
            mesh=data_mesh(num_workers),
            in_specs=(P("data"), *[P()] * len(shared)),
            out_specs=P("data"),
            check_vma=runner == "shard_map",
        )(x, *shared)

    return jax.jit(mapped)


def replicated_step(function, num_workers: int, check_vma: bool = True):
    """`function` of (local value, *shared) -> jitted, with ``out_specs=P()``: the result is one for all workers."""

    @jax.jit
    def run(x, *shared):
        return jax.shard_map(
            lambda x, *shared: function(jax.tree.map(lambda leaf: leaf[0], x), *shared),
            mesh=data_mesh(num_workers),
            in_specs=(P("data"), *[P()] * len(shared)),
            out_specs=P(),
            check_vma=check_vma,
        )(x, *shared)

    return run


def update(tx, count=0):
    """A function of local gradients: what one update makes of them."""
    return lambda grads: tx.update(grads, SkipReduceState(jnp.int32(count)))[0]


def contributors(slice_index: int, num_workers: int, num_skipped: int, shift: int = 0) -> set[int]:
    """Who is in slice j, in the words of the paper: all but the workers j, .., j+k-1, slice indices moved by c."""
    unshifted = slice_index - shift
    skipped = {(unshifted + i) % num_workers for i in range(num_skipped)}
    return set(range(num_workers)) - skipped


def expected_sum(num_workers: int, num_skipped: int, shift: int, slice_size: int = 1) -> np.ndarray:
    """The sum over the contributors of each slice, where worker r contributes 2**r to every element."""
    sums = [sum(2.0**r for r in contributors(j, num_workers, num_skipped, shift)) for j in range(num_workers)]
    return np.repeat(np.asarray(sums, np.float32), slice_size)


def powers_of_two(num_workers: int, num_elements: int, dtype=np.float32) -> np.ndarray:
    """Worker r's row holds 2**r: the bits of a sum name its contributors, exactly."""
    return np.repeat(2.0 ** np.arange(num_workers), num_elements).reshape(num_workers, num_elements).astype(dtype)


def normal(shape, dtype=jnp.float32, seed: int = 0) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=shape)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        values = values + 1j * np.random.default_rng(seed + 1).normal(size=shape)
    if jnp.issubdtype(dtype, jnp.integer):
        values = np.round(20 * values)
    return jnp.asarray(values.astype(np.dtype(dtype)))


def by_reference(x, num_skipped, shift, num_gather_skipped=0, accumulator=None, wire_dtype=None):
    """What the schedule gives, run in NumPy: flattened, padded, cut, reduced, put together."""
    x = np.asarray(x)
    num_workers, size = x.shape[0], x[0].size
    width = -(-size // num_workers)
    padded = np.zeros((num_workers, num_workers * width), x.dtype)
    padded[:, :size] = x.reshape(num_workers, -1)
    schedule = RING.schedule(num_workers, num_skipped, shift, num_gather_skipped)
    slices = padded.reshape(num_workers, num_workers, width)
    wire_dtype = None if wire_dtype is None else jnp.dtype(wire_dtype)
    return _reference.run(schedule, slices, accumulator, wire_dtype).reshape(num_workers, -1)[:, :size].reshape(x.shape)


def bits(x) -> bytes:
    return np.asarray(x).tobytes()


@functools.cache
def _operations() -> re.Pattern:
    kinds = "all-gather|all-reduce|collective-permute|all-to-all|reduce-scatter"
    return re.compile(rf"= (\(.*?\)|\S+) ({kinds})(?:-start)?\(")


def collectives(compiled_text: str) -> list[tuple[str, str]]:
    """(type, operation) of each collective in the text of a compiled program."""
    return [(match[1], match[2]) for match in _operations().finditer(compiled_text)]


def count_collectives(jitted, *args) -> dict[str, int]:
    counts: dict[str, int] = {}
    for _, operation in collectives(jitted.lower(*args).compile().as_text()):
        counts[operation] = counts.get(operation, 0) + 1
    return counts
