"""importance(): the share of each gradient among the largest elements of the tree (section 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

from jax_skipreduce._gradients.selection import indices_of, treatments
from jax_skipreduce._workers.axes import AxisName, make_varying, varying_axes
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.renamed import renamed

# Magnitudes are compared by the bits of a float32 without its sign: these integers have the same order.
_NUM_BITS = 31
_INFINITY = 0x7F800000
# The number of bits, from the highest, that a value of a narrower type can set.
_NUM_BITS_OF = {"bfloat16": 15, "float16": 18}

_MAX_COUNT = 2**31 - 1
_LOW_BITS = 10


class _Count(NamedTuple):
    """A number of elements, ``high * 2**10 + low``, because one int32 is too short for large trees."""

    high: Any
    low: Any

    def as_float(self) -> jax.Array:
        return jnp.float32(2**_LOW_BITS) * self.high.astype(jnp.float32) + self.low.astype(jnp.float32)


@renamed(top_fraction="top_ratio")
def importance(grads: Any, top_ratio: float = 0.25, *, axis_name: AxisName | None = None) -> Any:
    """The share of each gradient's elements that are among the largest of the whole tree.

    An element is important if its magnitude is in the top `top_ratio` of all elements (SkipReduce, MICRO 2025, section
    4.4, Fig. 9). `choose_protected` turns the shares into a choice for ``skipreduce(protect=..)``.

    **Exact at any size.** The threshold is found bit by bit, in 31 passes over float32, 15 over bfloat16, 18 over
    float16, which compare and count. Nothing is sorted, copied or flattened, so sharded arrays stay where they are.

    - **In pjit programs and outside of jax.jit** the function ranks whole arrays. Gradients that are stacked by worker
      form one pool. XLA adds up the counts: a few bytes per leaf and pass.
    - **In jax.shard_map, vmap and pmap** the function ranks what this worker holds, and sends nothing. With
      `axis_name`, one `lax.pmean` of 4 bytes per leaf averages the shares of the workers. If parameters are cut over
      a model axis there, name that axis too: each device then ranks its own shards, which is an estimate.

    Ties at the threshold share the remaining places. Zeros are never important. float64 is compared as float32.

    Args:
      grads: pytree of arrays, float or complex (by absolute value). Integer and empty leaves are not ranked.
      top_ratio: in (0, 1]. This share of all elements, rounded, but at least one element, is important.
      axis_name: a mesh axis or a tuple of axes to average over, where they are bound.

    Returns:
      The structure of `grads`, with a float32 scalar in [0, 1] per leaf; 0 for leaves that are not ranked. **All
      shares are NaN** if any element is NaN or infinite, with `axis_name` on any worker.

    Raises:
      ValueError: `top_ratio` is out of range, or an axis is not bound.
      TypeError: `top_ratio` is not a number, a leaf is not an array, or its dtype cannot be reduced.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> grads = {"conv": jnp.array([4.0, -3.0]), "dense": jnp.array([0.1, -3.5, 0.2, 0.3, -1.0, 2.0])}
      >>> {name: float(share) for name, share in sr.importance(grads, 0.25).items()}  # the largest two of eight
      {'conv': 0.5, 'dense': 0.1666666716337204}
    """
    expected = "expected a number in (0, 1]: the share of all elements that count as important, such as 0.25"
    if isinstance(top_ratio, (bool, Tracer)) or not isinstance(top_ratio, (int, float, np.number)):
        raise TypeError(f"top_ratio={top_ratio!r} ({type(top_ratio).__name__}): {expected}")
    if not 0 < top_ratio <= 1:  # NaN fails this, too
        raise ValueError(f"top_ratio={top_ratio}: {expected}")
    leaves, treedef = jax.tree.flatten(grads)
    ranked = indices_of(treatments(grads, [False] * len(leaves), min_size=0), "compressed")
    shares = [jnp.float32(0)] * len(leaves)
    if ranked:
        arrays = [jnp.asarray(leaves[i]) for i in ranked]
        num_important = max(1, round(top_ratio * sum(array.size for array in arrays)))
        wanted = _Count(*map(jnp.int32, divmod(num_important, 2**_LOW_BITS)))
        for index, share in zip(ranked, _shares(arrays, wanted), strict=True):
            shares[index] = share
    if axis_name is not None and shares:
        group = Group.of(axis_name)
        # One collective for all leaves: so few bytes take no longer than the bytes of one leaf.
        shares = list(lax.pmean(group.local(jnp.stack(shares)), group.names))
    return jax.tree.unflatten(treedef, shares)


# Compiled once for all calls outside of jax.jit; inside it changes nothing.
@jax.jit
def _shares(leaves: list[jax.Array], wanted: _Count) -> list[jax.Array]:
    """The share of each leaf's elements that are among the `wanted` largest. No leaf is empty."""
    num_bits = max(_NUM_BITS_OF.get(leaf.dtype.name, _NUM_BITS) for leaf in leaves)

    def count(compare: Callable[[jax.Array], jax.Array]) -> list[_Count]:
        # Each pass takes the bits from the gradients anew, so that no copy of the gradients is kept.
        return [_count(compare(_magnitude_bits(leaf))) for leaf in leaves]

    def next_bit(number: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (jnp.uint32(_NUM_BITS - 1) - number.astype(jnp.uint32)))
        found = _total(count(lambda bits: bits >= candidate))
        enough = (found.high > wanted.high) | ((found.high == wanted.high) & (found.low >= wanted.low))
        return jnp.where(enough, candidate, threshold)

    # The largest magnitude that at least `wanted` elements reach. It varies over the axes that the elements vary over.
    start = make_varying(jnp.uint32(0), tuple(frozenset[Any]().union(*map(varying_axes, leaves))))
    threshold = lax.fori_loop(0, num_bits, next_bit, start)

    larger, equal = count(lambda bits: bits > threshold), count(lambda bits: bits == threshold)
    taken = _total(larger)
    room = _Count(wanted.high - taken.high, wanted.low - taken.low).as_float()
    credit = jnp.where(threshold == 0, jnp.float32(0), room / _total(equal).as_float())
    num_infinite = _total(count(lambda bits: bits >= jnp.uint32(_INFINITY))).as_float()
    credit = jnp.where(num_infinite > 0, jnp.float32(jnp.nan), credit)
    return [
        (own.as_float() + credit * ties.as_float()) / jnp.float32(leaf.size)
        for own, ties, leaf in zip(larger, equal, leaves, strict=True)
    ]


def _magnitude_bits(x: jax.Array) -> jax.Array:
    """uint32 of the shape of `x`, in the order of the magnitudes. As floats, XLA may flush small ones to zero."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    else:
        real = jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
        bits = lax.bitcast_convert_type(real.astype(jnp.float32), jnp.uint32)
    return bits & jnp.uint32(2**_NUM_BITS - 1)


def _count(flags: jax.Array) -> _Count:
    """The number of flags that are set."""
    if flags.size <= _MAX_COUNT:
        return _carried(jnp.int32(0), jnp.sum(flags, dtype=jnp.int32))
    # First along the longest dimension, then along the others. Each of the others has at most 2**21 elements, the root
    # of 2**42, and 2**21 lows of 10 bits fit in an int32. Flattening instead would gather sharded arrays.
    longest = int(np.argmax(flags.shape))
    high, low = _carried(jnp.int32(0), jnp.sum(flags, axis=longest, dtype=jnp.int32))
    while low.ndim:
        high, low = _carried(jnp.sum(high, axis=-1, dtype=jnp.int32), jnp.sum(low, axis=-1, dtype=jnp.int32))
    return _Count(high, low)


def _total(counts: Sequence[_Count]) -> _Count:
    return _carried(sum(each.high for each in counts), sum(each.low for each in counts))


def _carried(high: Any, low: Any) -> _Count:
    """The same number with a `low` of 10 bits."""
    return _Count(high + (low >> _LOW_BITS), low & (2**_LOW_BITS - 1))
