"""importance(): which gradients hold the largest elements of the tree (section 4.4)."""

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

# Magnitudes are compared by the bits of a float32 without its sign: as integers they are in the same order.
_NUM_BITS = 31
_SIGN_OFF = 2**_NUM_BITS - 1
_INFINITY = 0x7F800000

# What a float32 needs of these bits to hold a value of a narrower type: the others are zero.
_NUM_BITS_OF = {"bfloat16": 15, "float16": 18}

# Elements that are counted in one int32.
_MAX_COUNT = 2**31 - 1
_LIMB_BITS = 10


class _Count(NamedTuple):
    """A number of elements, ``high * 2**10 + low``, because trees have more than 2**31 of them. Two int32."""

    high: Any
    low: Any

    def as_float(self) -> jax.Array:
        return jnp.float32(2**_LIMB_BITS) * self.high.astype(jnp.float32) + self.low.astype(jnp.float32)


def importance(grads: Any, top_fraction: float = 0.25, *, axis_name: AxisName | None = None) -> Any:
    """For each gradient the share of its elements that are among the largest of the whole tree.

    An element is important if its magnitude is in the global top `top_fraction`; a layer is, if many of its elements
    are. `choose_protected` makes a choice of it for ``skipreduce(protect=..)``, `track_importance` averages over steps.

    **Exact at any size.** The magnitude that separates them is found bit by bit, a radix select of one bit per
    pass: 31 passes over float32, 15 over bfloat16, 18 over float16. A pass compares and counts, so nothing is sorted,
    copied or flattened: it runs under `jax.jit`, and sharded arrays stay where they are.

    - **In pjit programs**, or outside of `jax.jit`: over arrays as they are. Gradients that are stacked by worker are
      ranked in one pool. XLA adds up the counts, a few bytes per leaf and pass.
    - **In jax.shard_map** (also `vmap` and `pmap`): over what this worker holds, and nothing is sent. With `axis_name`
      each worker ranks its own gradient, and shares are averaged: one `lax.pmean` of 4 bytes per leaf. If parameters
      are cut over a model axis there, name it too: each device then ranks its own shards, an estimate.

    Of elements of equal magnitude none is larger: if not all of them fit in, each counts for the same fraction, and
    their order does not matter. Zeros are never important: all shares of an all-zero tree are 0.

    float64 is compared as float32, complex numbers by their absolute value.

    Args:
      grads: pytree of arrays of any shape, float or complex. Integer and empty leaves are not ranked.
      top_fraction: in (0, 1]; that share of all n elements, rounded, at least one, is important.
      axis_name: a mesh axis or a tuple of them to average over, where they are bound.

    Returns:
      The structure of `grads`, with a float32 scalar in [0, 1] for each leaf, 0 for what is not ranked. **All are NaN**
      if any element is NaN or infinite (with `axis_name`: on any worker). With `axis_name`, the same on all workers.

    Raises:
      ValueError: `top_fraction` is out of range, or an axis is not bound.
      TypeError: `top_fraction` is no number, or a leaf is no array or has a dtype that cannot be reduced.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> grads = {"conv": jnp.array([4.0, -3.0]), "dense": jnp.array([0.1, -3.5, 0.2, 0.3, -1.0, 2.0])}
      >>> {name: float(share) for name, share in sr.importance(grads, 0.25).items()}  # the largest two of eight
      {'conv': 0.5, 'dense': 0.1666666716337204}

    References:
      SkipReduce, MICRO 2025: section 4.4, Fig. 9.
    """
    check_top_fraction(top_fraction)
    leaves, treedef = jax.tree.flatten(grads)
    ranked = indices_of(treatments(grads, [False] * len(leaves), min_size=0), "compressed")
    shares = [jnp.float32(0)] * len(leaves)
    if ranked:
        arrays = [jnp.asarray(leaves[i]) for i in ranked]
        wanted = num_important(sum(array.size for array in arrays), top_fraction)
        high, low = divmod(wanted, 2**_LIMB_BITS)
        for index, share in zip(ranked, _shares(arrays, _Count(jnp.int32(high), jnp.int32(low))), strict=True):
            shares[index] = share
    if axis_name is not None:
        group = Group.of(axis_name)
        if shares:
            # Joined: a collective takes the time of its steps, not of so few bytes.
            shares = list(lax.pmean(group.local(jnp.stack(shares)), group.names))
    return jax.tree.unflatten(treedef, shares)


def check_top_fraction(top_fraction: Any) -> None:
    """Raises TypeError or ValueError if `top_fraction` is no number in (0, 1]."""
    expected = "expected a number in (0, 1]: the share of all elements that count as important, such as 0.25"
    if isinstance(top_fraction, (bool, Tracer)) or not isinstance(top_fraction, (int, float, np.number)):
        raise TypeError(f"top_fraction={top_fraction!r} ({type(top_fraction).__name__}): {expected}")
    if not 0 < top_fraction <= 1:  # neither is NaN
        raise ValueError(f"top_fraction={top_fraction}: {expected}")


def num_important(num_elements: int, top_fraction: float) -> int:
    """How many of so many elements are important."""
    return max(1, round(top_fraction * num_elements))


# Compiled once for all calls outside of jax.jit; inside it changes nothing.
@jax.jit
def _shares(leaves: list[jax.Array], wanted: _Count) -> list[jax.Array]:
    """Of each leaf, none of them empty, the share of its elements that are among so many `wanted` ones."""
    num_bits = max(_NUM_BITS_OF.get(leaf.dtype.name, _NUM_BITS) for leaf in leaves)

    def count(compare: Callable[[jax.Array], jax.Array]) -> list[_Count]:
        # From the gradients in each pass, so that no copy of them has to be kept.
        return [_count(compare(_magnitude_bits(leaf))) for leaf in leaves]

    def next_bit(number: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(1) << (jnp.uint32(_NUM_BITS - 1) - number.astype(jnp.uint32)))
        found = _total(count(lambda bits: bits >= candidate))
        enough = (found.high > wanted.high) | ((found.high == wanted.high) & (found.low >= wanted.low))
        return jnp.where(enough, candidate, threshold)

    # The largest magnitude that at least so many elements have. It is typed as the elements it is compared with are.
    varying = tuple(frozenset[Any]().union(*map(varying_axes, leaves)))
    start = make_varying(jnp.uint32(0), varying)
    threshold = lax.fori_loop(0, num_bits, next_bit, start)

    larger, equal = count(lambda bits: bits > threshold), count(lambda bits: bits == threshold)
    taken = _total(larger)
    room = _Count(wanted.high - taken.high, wanted.low - taken.low).as_float()
    credit = jnp.where(threshold == 0, jnp.float32(0), room / _total(equal).as_float())
    infinite = _total(count(lambda bits: bits >= jnp.uint32(_INFINITY)))
    credit = jnp.where((infinite.high > 0) | (infinite.low > 0), jnp.float32(jnp.nan), credit)
    return [
        (own.as_float() + credit * ties.as_float()) / jnp.float32(leaf.size)
        for own, ties, leaf in zip(larger, equal, leaves, strict=True)
    ]


def _magnitude_bits(x: jax.Array) -> jax.Array:
    """uint32 of the shape of `x`, in the order of the magnitudes. Bits, because XLA may flush small floats to zero."""
    if x.dtype == jnp.bfloat16:
        bits = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << jnp.uint32(16)
    else:
        real = jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.complexfloating) else x
        bits = lax.bitcast_convert_type(real.astype(jnp.float32), jnp.uint32)
    return bits & jnp.uint32(_SIGN_OFF)


def _count(flags: jax.Array) -> _Count:
    """How many of them are set."""
    if flags.size <= _MAX_COUNT:
        return _carried(jnp.int32(0), jnp.sum(flags, dtype=jnp.int32))
    # Along the longest dimension at once, then along the others: each is at most the root of 2**42 elements, and so
    # many lows of 10 bits fit in an int32. Not flattened, because that would gather what is sharded.
    longest = int(np.argmax(flags.shape))
    high, low = _carried(jnp.int32(0), jnp.sum(flags, axis=longest, dtype=jnp.int32))
    while low.ndim:
        high, low = _carried(jnp.sum(high, axis=-1, dtype=jnp.int32), jnp.sum(low, axis=-1, dtype=jnp.int32))
    return _Count(high, low)


def _total(counts: Sequence[_Count]) -> _Count:
    return _carried(sum(each.high for each in counts), sum(each.low for each in counts))


def _carried(high: Any, low: Any) -> _Count:
    """The same number with a `low` of 10 bits."""
    return _Count(high + (low >> _LIMB_BITS), low & (2**_LIMB_BITS - 1))
