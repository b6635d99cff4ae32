"""What travels: floats in a narrower dtype if that is asked for, 16-bit floats as 16 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# What values may be rounded to for the wire. Narrower ones lose whole gradients in a sum of many.
WIRE_DTYPES = ("bfloat16", "float16", "float32")


def check_wire_dtype(wire_dtype: Any) -> np.dtype | None:
    """`wire_dtype` as a dtype. Raises TypeError or ValueError if nothing can be sent in it."""
    if wire_dtype is None:
        return None
    expected = f"expected one of {', '.join(WIRE_DTYPES)}, or None to send values as they are"
    try:
        dtype = jnp.dtype(wire_dtype)
    except TypeError:
        raise TypeError(f"wire_dtype={wire_dtype!r}: {expected}") from None
    if dtype.name not in WIRE_DTYPES:
        raise ValueError(f"wire_dtype={dtype.name}: {expected}")
    return dtype


def sent_dtype(dtype: Any, wire_dtype: np.dtype | None) -> np.dtype:
    """What values of `dtype` are sent as: `wire_dtype` if they are wider floats, else as they are."""
    dtype = jnp.dtype(dtype)
    if wire_dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return dtype
    return wire_dtype if wire_dtype.itemsize < dtype.itemsize else dtype


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """`x`, in its own dtype, with values of the narrower float `dtype`."""
    if dtype == x.dtype:
        return x
    # Two casts would not do: XLA is free to leave out both.
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)


def in_own_dtype(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``move(x)``, which moves values unchanged, with 16-bit floats as 16 bits on the wire.

    XLA's CPU backend widens the float16 and bfloat16 operands of a collective to float32, and
    sends twice the bytes. It leaves integers alone.
    """
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return move(x)

    @jax.custom_jvp
    def move_bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    # A bit cast has no derivative, but what is done here is linear.
    @move_bits.defjvp
    def move_bits_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return move_bits(*primals), move(*tangents)

    return move_bits(x)
