"""fsdp_gather: weights that are sharded over the data axis, gathered for use and left out in part (section 6.3).

Worker r owns slice r of every weight. Going forward, slices travel around a ring, and the last steps may be left out: a
worker then computes with zeros in place of the slices of the next workers on the ring. Going backward, gradients travel
the other way and end at their owners, so the chain of a slice is made of the very workers that the slice had come to.

Since owners stay, no shift can move what is skipped, as it does in `all_reduce`. The ring is laid through the
workers in another order instead, which the step counter picks.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Hashable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_skipreduce._backends.ppermute import (
    Normalize,
    Ring,
    check_dtype,
    check_normalize,
    divide,
    from_block,
    integer,
    num_steps_skipped,
    slice_size,
    to_block,
)
from jax_skipreduce._fsdp import ring as _fsdp_ring
from jax_skipreduce._gradients.buckets import group_of
from jax_skipreduce._gradients.selection import leaf_paths
from jax_skipreduce._gradients.shift import random_shifts
from jax_skipreduce._workers.axes import AxisName, outside_of_the_trace, varying_axes


def fsdp_cut(tree: Any, num_workers: int) -> Any:
    """Weights as `fsdp_gather` takes them: each flattened, padded with zeros and cut in N slices, end to end.

    Args:
      tree: pytree of arrays. Layers that are stacked for `lax.scan` are cut one by one:
        ``jax.vmap(lambda layer: sr.fsdp_cut(layer, num_workers))(layers)``.
      num_workers: N. Outside of ``shard_map``: what comes out is sharded with ``P(axis_name)`` (stacked layers with
        ``P(None, axis_name)``), and worker r gets slice r.

    Returns:
      A pytree of 1-D arrays of N * ceil(size / N) elements, in the dtypes given.

    Raises:
      ValueError: `num_workers` is less than 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> sr.fsdp_cut(jnp.arange(6.0).reshape(2, 3), num_workers=4)
      Array([0., 1., 2., 3., 4., 5., 0., 0.], dtype=float32)
    """
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: expected at least 1")
    return jax.tree.map(lambda x: to_block(jnp.asarray(x), num_workers).reshape(-1), tree)


def fsdp_join(tree: Any, shape: Any) -> Any:
    """The inverse of `fsdp_cut`: whole weights, for a test of the model or a checkpoint that any N can read.

    Args:
      tree: pytree of arrays as `fsdp_cut` makes them.
      shape: for each of them the shape it had: a pytree of the same structure, of tuples or of anything with a
        ``shape``, such as what `jax.eval_shape` gives.

    Returns:
      A pytree of arrays of these shapes.

    Raises:
      ValueError: an array is too short for its shape, or `shape` has another structure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> sr.fsdp_join(jnp.arange(8.0), (2, 3))
      Array([[0., 1., 2.],
             [3., 4., 5.]], dtype=float32)
    """
    leaves, structure = jax.tree.flatten(tree)
    joined = []
    for path, leaf, wanted in zip(leaf_paths(tree), leaves, _shapes(shape, structure), strict=True):
        if leaf.size < prod(wanted):
            raise ValueError(f"leaf {path!r} has {leaf.size} elements, fewer than its shape {wanted}")
        joined.append(from_block(leaf, wanted))
    return jax.tree.unflatten(structure, joined)


def fsdp_gather(
    shard: Any,
    axis_name: AxisName,
    *,
    shape: Any = None,
    skip_weights: int | jax.Array = 0,
    skip_grads: int | jax.Array = 0,
    step: int | jax.Array | None = None,
    seed: int = 0,
    num_orders: int = 10,
    normalize: Normalize | None = "skip",
    align: bool = True,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> Any:
    """Weights from their shards, for use in the forward pass; its gradient is reduced and scattered to the shards.

    Worker r gives slice r. With ``skip_weights=k`` the all-gather leaves out the last k of its N-1 steps: a worker gets
    its own slice and those of the N-1-k workers before it on the ring, and zeros for the k after it. The gradient with
    respect to `shard` is a reduce-scatter around the same ring in the opposite direction: the chain of slice j starts
    at the worker N-1-k places after j, and ends at its owner j. So the gradients that are left out are those of the
    weights that were not there.

    A gradient of a slice that a worker did not gather is never contributed, so the reduce-scatter leaves out
    max(skip_weights, skip_grads) steps: `skip_grads` matters where it is the larger one. (`align` turns that off.)

    Call it inside the function that is differentiated. Under `jax.checkpoint` the weights are gathered again in the
    backward pass, and not kept. In a `lax.scan` over layers, it stands in the body. Workers that are simulated by
    `jax.vmap` are differentiated one by one, ``vmap(grad(..))``: from outside, JAX does not know their axis any more.

    Bytes on the wire per worker, where S is the sum of the sizes of its shards: going forward
    (N-1 - skip_weights) * S * itemsize, once more under `jax.checkpoint`; going backward
    (N-1 - max(skip_weights, skip_grads)) * S * itemsize. All shards of one dtype travel together.

    float16 and bfloat16 gradients are added up in float32 and rounded once per step, as in `reduce_scatter`.

    Args:
      shard: this worker's slices: a pytree of float or complex arrays, of any shape that is the same on all workers.
      axis_name: a mesh axis or a tuple of them (in any order); under `vmap` and `pmap` one axis.
      shape: shapes of the whole weights, a pytree of the structure of `shard`, of tuples or of anything with a
        ``shape``; padding is cut off, as `fsdp_cut` makes it. None: slices are joined along their first axis, as is
        right for weights that are sharded along it.
      skip_weights: all-gather steps left out, 0..N-1. An int, or a traced integer scalar that is the same on all
        workers, clamped to that: so a warm-up recompiles nothing, ``jnp.where(step < 1000, 0, 4)``.
      skip_grads: reduce-scatter steps left out, 0..N-1; likewise.
      step: the step counter, the same on all workers: with `seed` it picks the order of the ring. An int, or a traced
        integer scalar. Give each of several calls in a step its own, ``step * num_layers + layer``: else all leave out
        the same workers. None: the ring goes from rank to rank, always, and the same slices are skipped in every step.
      seed: of the orders; the same on all workers.
      num_orders: the most orders to choose from. Each is one branch of a `lax.switch`. The first two are the ring from
        rank to rank, both ways: all others send to workers that are no neighbours in rank.
      normalize: ``"skip"`` divides gradients by N: what was skipped counts as zero. ``"drop"`` divides by the number
        of workers that contributed. None gives the sum.
      align: False contributes the gradients of weights that were not there (taken to be zero), with `skip_grads` as it
        stands: "SkipReduce(AG)" of Fig. 19, for comparison. It trains worse.
      wire_dtype: what wider floats are sent as, ``"bfloat16"`` for half the bytes of float32. Weights come rounded
        to it, the own slice too; gradients are rounded as they travel. Integers are no weights.

    Returns:
      A pytree of whole weights, in the dtypes given, typed as differing between workers.

    Raises:
      TypeError: a shard is no float array, or a count or `step` no integer.
      ValueError: an axis is not bound, a count is out of range or differs between workers, shapes do not fit, or a
        shard is typed as the same on all workers.

    Example:
      Four simulated workers; one step of the all-gather is left out, so each lacks the slice of the next worker.

      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> shards = jnp.arange(1.0, 5.0).reshape(4, 1)
      >>> gather = lambda shard: sr.fsdp_gather(shard, "data", skip_weights=1)
      >>> jax.vmap(gather, axis_name="data")(shards)
      Array([[1., 0., 3., 4.],
             [1., 2., 0., 4.],
             [1., 2., 3., 0.],
             [0., 2., 3., 4.]], dtype=float32)

      Worker r contributes 2**r: the bits of a sum name its contributors, those that had the slice.

      >>> loss = lambda shard, c: jnp.sum(c * sr.fsdp_gather(shard, "data", skip_weights=1, normalize=None))
      >>> jax.vmap(jax.grad(loss), axis_name="data")(shards, 2.0 ** jnp.arange(4))[:, 0]
      Array([ 7., 14., 13., 11.], dtype=float32)

    References:
      SkipReduce, MICRO 2025, section 6.3. The orders of the ring are ours; see docs/fsdp.md.
    """
    ring = Ring.of(axis_name, wire_dtype)
    check_normalize(normalize, allow_none=True)
    numbers = {
        "skip_weights": num_steps_skipped("skip_weights", skip_weights, ring),
        "skip_grads": num_steps_skipped("skip_grads", skip_grads, ring),
        "order": _pick_order(step, seed, ring, num_orders),
    }
    static = {name: value for name, value in numbers.items() if isinstance(value, int)}
    traced = {name: value for name, value in numbers.items() if not isinstance(value, int)}
    how = _How(ring.names, normalize, align, ring.wire_dtype, num_orders, tuple(static.items()))

    leaves, structure = jax.tree.flatten(shard)
    leaves = [_checked(path, leaf, ring) for path, leaf in zip(leaf_paths(shard), leaves, strict=True)]
    shapes: list[tuple[int, ...]] = [()] * len(leaves) if shape is None else _shapes(shape, structure)
    for i, (path, leaf) in enumerate(zip(leaf_paths(shard), leaves, strict=True)):
        shapes[i] = _whole_shape(path, leaf, None if shape is None else shapes[i], ring.size)

    groups: dict[Hashable, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(group_of(leaf, varying_axes(leaf)), []).append(i)
    whole: dict[int, jax.Array] = {}
    for members in groups.values():
        rows: Any = _gather(how, tuple(leaves[i].reshape(-1) for i in members), traced)
        whole |= {i: from_block(block, shapes[i]) for i, block in zip(members, rows, strict=True)}
    return jax.tree.unflatten(structure, [whole[i] for i in range(len(leaves))])


@dataclasses.dataclass(frozen=True)
class _How:
    """What is known of a gather when it is traced; hashable, for `jax.custom_vjp`.

    Attributes:
      names: the axes.
      normalize, align, wire_dtype, num_orders: as in `fsdp_gather`.
      static: those of ``skip_weights``, ``skip_grads``, ``order`` that are ints. The others are operands.
    """

    names: tuple[Hashable, ...]
    normalize: Normalize | None
    align: bool
    wire_dtype: Any
    num_orders: int
    static: tuple[tuple[str, int], ...]


def _pick_order(step: Any, seed: int, ring: Ring, num_orders: Any) -> int | jax.Array:
    """Which of the orders this step takes; the same number whether `step` is known or traced."""
    if isinstance(num_orders, bool) or not isinstance(num_orders, int) or num_orders < 1:
        raise ValueError(f"num_orders={num_orders!r}: expected an int, at least 1")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: expected an int, 0 to {2**32 - 1}")
    available = len(_fsdp_ring.ring_orders(ring.size, num_orders))
    if step is None:
        return 0
    step = integer("step", step, ring)
    if available == 1:
        return 0
    if isinstance(step, int):
        return outside_of_the_trace(lambda: int(random_shifts(seed, jnp.uint32(step % 2**32), 1, available)[0]))
    return random_shifts(seed, step.astype(jnp.uint32), 1, available)[0]


def _checked(path: str, leaf: Any, ring: Ring) -> jax.Array:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(f"shard {path!r} is {leaf!r} ({type(leaf).__name__}): expected an array")
    check_dtype(leaf.dtype, f"shard {path!r}")
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(f"shard {path!r} has dtype {leaf.dtype}: expected floats. sr.all_gather gathers integers")
    shared = [name for name in ring.names if name not in varying_axes(leaf)] if ring.tracked else []
    if shared:
        raise ValueError(
            f"shard {path!r} is the same on all workers of {', '.join(map(repr, shared))}, so it is no shard. Cut the "
            f"weights (sr.fsdp_cut) and pass them to shard_map with in_specs=P({ring.names[0]!r})"
        )
    return jnp.asarray(leaf)


def _shapes(shape: Any, structure: Any) -> list[tuple[int, ...]]:
    try:
        leaves = structure.flatten_up_to(shape)
        return [tuple(map(operator.index, leaf.shape if hasattr(leaf, "shape") else leaf)) for leaf in leaves]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"shape={shape!r}: expected for each array the shape of the whole, in the same structure: {error}"
        ) from None


def _whole_shape(path: str, leaf: jax.Array, shape: tuple[int, ...] | None, num_workers: int) -> tuple[int, ...]:
    """What N slices like `leaf` make."""
    if shape is None:
        if not leaf.shape:
            raise ValueError(f"shard {path!r} is a scalar, which has no axis to join along. Give shape=")
        return num_workers * leaf.shape[0], *leaf.shape[1:]
    if slice_size(prod(shape), num_workers) != leaf.size:
        raise ValueError(
            f"shape={shape} for shard {path!r}: {prod(shape)} elements over {num_workers} workers make slices of "
            f"{slice_size(prod(shape), num_workers)} elements, but it has {leaf.size}"
        )
    return shape


# A hand-written derivative for two reasons: loops with a traced number of steps have none, and the one of a ring
# that was cut short would not divide.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: _How, shards: tuple[jax.Array, ...], traced: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """1-D shards of one dtype -> blocks of shape (N, S_i), slice j in row j; zeros for what was not gathered."""
    ring = Ring.of(how.names, how.wire_dtype)
    values = dict(how.static) | traced
    own = jnp.concatenate(shards)
    orders = _fsdp_ring.ring_orders(ring.size, how.num_orders)
    rows = _fsdp_ring.gather(ring, orders, values["order"], values["skip_weights"], own)
    borders = np.cumsum([shard.size for shard in shards])[:-1]
    return tuple(jnp.split(rows, borders, axis=1))


def _gather_forward(how: _How, shards: tuple[jax.Array, ...], traced: dict[str, jax.Array]) -> tuple[Any, Any]:
    return _gather(how, shards, traced), traced


def _gather_backward(how: _How, traced: dict[str, jax.Array], blocks: tuple[jax.Array, ...]) -> tuple[Any, None]:
    """Gradients of the blocks on this worker -> the reduced gradients of its shards."""
    ring = Ring.of(how.names, how.wire_dtype)
    values = dict(how.static) | traced
    skipped, missing = values["skip_grads"], values["skip_weights"]
    if how.align:
        both_known = isinstance(skipped, int) and isinstance(missing, int)
        skipped = max(skipped, missing) if both_known else jnp.maximum(skipped, missing)
    rows = jnp.concatenate(blocks, axis=1)
    orders = _fsdp_ring.ring_orders(ring.size, how.num_orders)
    total = _fsdp_ring.scatter(ring, orders, values["order"], skipped, rows)
    total = divide(total, how.normalize, ring.size, ring.size - skipped).astype(rows.dtype)
    borders = np.cumsum([block.shape[1] for block in blocks])[:-1]
    return tuple(jnp.split(total, borders)), None


_gather.defvjp(_gather_forward, _gather_backward)
