"""fsdp_gather: weights that are sharded over the data axis, gathered for use and left out in part (section 6.3).

Worker r owns slice r of every weight. Going forward, slices travel around a ring, and the last steps may be left out: a
worker then computes with zeros in place of the slices of the next workers on the ring. Going backward, gradients travel
the other way and end at their owners, so the chain of a slice is made of the very workers that the slice had come to.

Owners stay the same, so no shift can move what is skipped, as it does in `all_reduce`. Instead, the ring goes through
the workers in another order, which the step counter picks.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_skipreduce._fsdp import ring as fsdp_ring
from jax_skipreduce._fsdp.cut import shapes_of
from jax_skipreduce._gradients.buckets import group_key
from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.shift import random_shifts
from jax_skipreduce._workers.arguments import check_dtype, checked_count, checked_integer
from jax_skipreduce._workers.axes import AxisName, outside_of_the_trace, varying_axes
from jax_skipreduce._workers.blocks import from_block, slice_size
from jax_skipreduce._workers.channel import Channel
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.mean import Normalize, check_normalize, normalized
from jax_skipreduce._workers.renamed import renamed
from jax_skipreduce._workers.wire import Wire


@renamed(skip_weights="num_gather_skipped", skip_grads="num_skipped")
def fsdp_gather(
    shard: Any,
    axis_name: AxisName,
    *,
    shape: Any = None,
    num_gather_skipped: int | jax.Array = 0,
    num_skipped: int | jax.Array = 0,
    step: int | jax.Array | None = None,
    seed: int = 0,
    num_orders: int = 10,
    normalize: Normalize | None = "skip",
    align: bool = True,
    wire_dtype: jax.typing.DTypeLike | None = None,
) -> Any:
    """Gathers weights from their shards. Its derivative reduces gradients, and scatters them to the shards.

    Worker r gives slice r. With ``num_gather_skipped=k`` the all-gather leaves out the last k of its N-1 steps: a
    worker gets its own slice and those of the N-1-k workers before it on the ring, and zeros for the k after it. The
    gradient with respect to `shard` is a reduce-scatter around the same ring in the opposite direction: the chain of
    slice j starts at the worker N-1-k places after j, and ends at its owner j. So the sum leaves out the gradients of
    weights that a worker did not have.

    A worker never contributes the gradient of a slice that it did not gather, so the reduce-scatter leaves out
    max(num_gather_skipped, num_skipped) steps. `num_skipped` matters where it is the larger number. (`align=False`
    turns that off.)

    Call `fsdp_gather` inside the function that is differentiated. Under `jax.checkpoint` the weights are gathered again
    in the backward pass, and not kept. In a `lax.scan` over layers, the call stands in the body. Workers that are
    simulated by `jax.vmap` are differentiated one by one, ``vmap(grad(..))``: from outside, JAX does not know their
    axis any more.

    Bytes on the wire per worker, where S is the sum of the sizes of its shards: going forward
    (N-1 - num_gather_skipped) * S * itemsize, once more under `jax.checkpoint`; going backward
    (N-1 - max(num_gather_skipped, num_skipped)) * S * itemsize. All shards of one dtype travel together.

    float16 and bfloat16 gradients are added up in float32 and rounded once per step, as in `reduce_scatter`.

    Args:
      shard: this worker's slices: a pytree of float or complex arrays, of any shape that is the same on all workers.
      axis_name: a mesh axis or a tuple of them (in any order); under `vmap` and `pmap` one axis.
      shape: shapes of the whole weights, a pytree of the structure of `shard`, of tuples or of anything with a
        ``shape``; padding is cut off, as `fsdp_cut` makes it. None: slices are joined along their first axis, as is
        right for weights that are sharded along it.
      num_gather_skipped: all-gather steps left out, 0..N-1. An int, or a traced integer scalar that is the same on all
        workers, which is clamped to 0..N-1. So a warm-up recompiles nothing: ``jnp.where(step < 1000, 0, 4)``.
      num_skipped: reduce-scatter steps left out, 0..N-1; an int, or a traced integer scalar as above.
      step: the step counter, the same on all workers: an int, or a traced integer scalar. `step` and `seed` pick the
        order of the ring. Give each of several calls in a step a `step` of its own, ``step * num_layers + layer``; else
        all calls leave out the same workers. None: the ring always goes from rank to rank, and the same slices are
        skipped in every step.
      seed: the seed of the orders; the same on all workers.
      num_orders: the most orders to choose from. Each order is one branch of a `lax.switch`. The first two orders are
        the ring from rank to rank, both ways. All other orders send to workers that are no neighbours in rank.
      normalize: ``"skip"`` divides gradients by N: what was skipped counts as zero. ``"drop"`` divides by the number
        of workers that contributed. None gives the sum.
      align: False contributes the gradients of weights that were not gathered (taken at zero), and leaves out
        `num_skipped` steps: "SkipReduce(AG)" of Fig. 19, for comparison. It trains worse.
      wire_dtype: the dtype in which wider floats are sent, ``"bfloat16"`` for half the bytes of float32. Weights come
        rounded to it, a worker's own slice included; gradients are rounded as they travel.

    Returns:
      A pytree of whole weights, in the dtypes of `shard`, typed as differing between workers.

    Raises:
      TypeError: a shard is no float array, or a count or `step` no integer.
      ValueError: an axis is not bound, a count is out of range or differs between workers, shapes do not fit, or a
        shard is typed as the same on all workers.

    Example:
      Four simulated workers; one step of the all-gather is left out, so each lacks the slice of the next worker.

      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> shards = jnp.arange(1.0, 5.0).reshape(4, 1)
      >>> gather = lambda shard: sr.fsdp_gather(shard, "data", num_gather_skipped=1)
      >>> jax.vmap(gather, axis_name="data")(shards)
      Array([[1., 0., 3., 4.],
             [1., 2., 0., 4.],
             [1., 2., 3., 0.],
             [0., 2., 3., 4.]], dtype=float32)

      Worker r contributes 2**r: the bits of a sum name its contributors, those that had the slice.

      >>> loss = lambda shard, c: jnp.sum(c * sr.fsdp_gather(shard, "data", num_gather_skipped=1, normalize=None))
      >>> jax.vmap(jax.grad(loss), axis_name="data")(shards, 2.0 ** jnp.arange(4))[:, 0]
      Array([ 7., 14., 13., 11.], dtype=float32)

    References:
      SkipReduce, MICRO 2025, section 6.3. The orders of the ring are ours; see docs/fsdp.md.
    """
    group, wire = Group.of(axis_name), Wire.of(wire_dtype)
    check_normalize(normalize, allow_none=True)
    numbers = {
        "num_gather_skipped": checked_count("num_gather_skipped", num_gather_skipped, group),
        "num_skipped": checked_count("num_skipped", num_skipped, group),
        "order": _pick_order(step, seed, group, num_orders),
    }
    static = {name: value for name, value in numbers.items() if isinstance(value, int)}
    traced = {name: value for name, value in numbers.items() if not isinstance(value, int)}
    how = _How(group.names, normalize, align, wire, num_orders, tuple(static.items()))

    leaves, structure = jax.tree.flatten(shard)
    leaves = [_checked(path, leaf, group) for path, leaf in zip(leaf_paths(shard), leaves, strict=True)]
    shapes: list[tuple[int, ...]] = [()] * len(leaves) if shape is None else shapes_of(shape, structure)
    for i, (path, leaf) in enumerate(zip(leaf_paths(shard), leaves, strict=True)):
        shapes[i] = _whole_shape(path, leaf, None if shape is None else shapes[i], group.size)

    groups: dict[Hashable, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(group_key(leaf, varying_axes(leaf)), []).append(i)
    whole: dict[int, jax.Array] = {}
    for members in groups.values():
        rows: Any = _gather(how, tuple(leaves[i].reshape(-1) for i in members), traced)
        whole |= {i: from_block(block, shapes[i]) for i, block in zip(members, rows, strict=True)}
    return jax.tree.unflatten(structure, [whole[i] for i in range(len(leaves))])


@dataclasses.dataclass(frozen=True)
class _How:
    """What is known about a gather when it is traced; hashable, for `jax.custom_vjp`.

    Attributes:
      names: the axes.
      normalize, align, num_orders: as in `fsdp_gather`.
      wire: the wire format.
      static: those of ``num_gather_skipped``, ``num_skipped`` and ``order`` that are ints. Traced numbers are operands.
    """

    names: tuple[Hashable, ...]
    normalize: Normalize | None
    align: bool
    wire: Wire
    num_orders: int
    static: tuple[tuple[str, int], ...]


def _pick_order(step: Any, seed: int, group: Group, num_orders: Any) -> int | jax.Array:
    """The number of the order of this step, the same whether `step` is known or traced."""
    if isinstance(num_orders, bool) or not isinstance(num_orders, int) or num_orders < 1:
        raise ValueError(f"num_orders={num_orders!r}: expected an int, at least 1")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise ValueError(f"seed={seed!r}: expected an int, 0 to {2**32 - 1}")
    available = len(fsdp_ring.ring_orders(group.size, num_orders))
    if step is None:
        return 0
    step = checked_integer("step", step, group)
    if available == 1:
        return 0
    if isinstance(step, int):
        return outside_of_the_trace(lambda: int(random_shifts(seed, jnp.uint32(step % 2**32), 1, available)[0]))
    return random_shifts(seed, step.astype(jnp.uint32), 1, available)[0]


def _checked(path: str, leaf: Any, group: Group) -> jax.Array:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(f"shard {path!r} is {leaf!r} ({type(leaf).__name__}): expected an array")
    check_dtype(leaf.dtype, f"shard {path!r}")
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(f"shard {path!r} has dtype {leaf.dtype}: expected floats. sr.all_gather gathers integers")
    if shared := group.shared_over(leaf):
        raise ValueError(
            f"shard {path!r} is the same on all workers of {', '.join(map(repr, shared))}, so it is no shard. Cut the "
            f"weights (sr.fsdp_cut) and pass them to shard_map with in_specs=P({group.names[0]!r})"
        )
    return jnp.asarray(leaf)


def _whole_shape(path: str, leaf: jax.Array, shape: tuple[int, ...] | None, num_workers: int) -> tuple[int, ...]:
    """The shape of the whole that N slices like `leaf` make."""
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


# A hand-written derivative for two reasons: loops with a traced number of steps have none, and the derivative of a
# shortened gather would not be normalised.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather(how: _How, shards: tuple[jax.Array, ...], traced: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """1-D shards of one dtype -> blocks of shape (N, S_i), slice j in row j; zeros for what was not gathered."""
    channel = Channel(Group.of(how.names), how.wire)
    values = dict(how.static) | traced
    own = jnp.concatenate(shards)
    orders = fsdp_ring.ring_orders(channel.group.size, how.num_orders)
    rows = fsdp_ring.gather(channel, orders, values["order"], values["num_gather_skipped"], own)
    borders = np.cumsum([shard.size for shard in shards])[:-1]
    return tuple(jnp.split(rows, borders, axis=1))


def _gather_forward(how: _How, shards: tuple[jax.Array, ...], traced: dict[str, jax.Array]) -> tuple[Any, Any]:
    return _gather(how, shards, traced), traced


def _gather_backward(how: _How, traced: dict[str, jax.Array], blocks: tuple[jax.Array, ...]) -> tuple[Any, None]:
    """Gradients of the blocks on this worker -> the reduced gradients of its shards."""
    channel = Channel(Group.of(how.names), how.wire)
    values = dict(how.static) | traced
    skipped, missing = values["num_skipped"], values["num_gather_skipped"]
    if how.align:
        both_known = isinstance(skipped, int) and isinstance(missing, int)
        skipped = max(skipped, missing) if both_known else jnp.maximum(skipped, missing)
    rows = jnp.concatenate(blocks, axis=1)
    orders = fsdp_ring.ring_orders(channel.group.size, how.num_orders)
    total = fsdp_ring.scatter(channel, orders, values["order"], skipped, rows)
    total = normalized(total, how.normalize, channel.group.size, channel.group.size - skipped).astype(rows.dtype)
    borders = np.cumsum([block.shape[1] for block in blocks])[:-1]
    return tuple(jnp.split(total, borders)), None


_gather.defvjp(_gather_forward, _gather_backward)
