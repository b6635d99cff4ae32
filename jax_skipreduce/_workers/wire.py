"""The wire format: floats in a narrower dtype if `wire_dtype` says so, 16-bit floats as 16 bits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# Dtypes that values may be rounded to for the wire. Narrower dtypes lose whole gradients in a sum of many.
WIRE_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Wire:
    """The format in which values are sent.

    Attributes:
      dtype: the dtype that wider floats are rounded to for the wire. None: values are sent as they are.
    """

    dtype: np.dtype | None = None

    def __str__(self) -> str:
        return str(self.dtype)

    @classmethod
    def of(cls, wire_dtype: Any) -> Wire:
        """The format that a user names.

        Raises:
          TypeError, ValueError: nothing can be sent in `wire_dtype`.
        """
        if wire_dtype is None:
            return cls()
        expected = f"expected one of {', '.join(WIRE_DTYPES)}, or None to send values as they are"
        try:
            dtype = jnp.dtype(wire_dtype)
        except TypeError:
            raise TypeError(f"wire_dtype={wire_dtype!r}: {expected}") from None
        if dtype.name not in WIRE_DTYPES:
            raise ValueError(f"wire_dtype={dtype.name}: {expected}")
        return cls(dtype)

    def sent_as(self, dtype: Any) -> np.dtype:
        """The dtype in which values of `dtype` are sent."""
        dtype = jnp.dtype(dtype)
        if self.dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            return dtype
        return self.dtype if self.dtype.itemsize < dtype.itemsize else dtype

    def num_bytes(self, num_elements: int, dtype: Any) -> int:
        """Bytes of so many elements of `dtype` on the wire."""
        return num_elements * self.sent_as(dtype).itemsize

    def round(self, x: jax.Array) -> jax.Array:
        """`x`, in its own dtype, with the values that would arrive."""
        sent = self.sent_as(x.dtype)
        if sent == x.dtype:
            return x
        # Not two casts: XLA is free to leave out both.
        info = jnp.finfo(sent)
        return lax.reduce_precision(x, exponent_bits=info.nexp, mantissa_bits=info.nmant)

    def move(self, move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        """``move(x)`` with values rounded as they are sent. `move` moves values unchanged."""
        return _as_bits(move, x.astype(self.sent_as(x.dtype))).astype(x.dtype)


AS_THEY_ARE = Wire()


def _as_bits(move: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """``move(x)``, with 16-bit floats as 16 bits on the wire.

    XLA's CPU backend widens the float16 and bfloat16 operands of a collective to float32, and
    sends twice the bytes. Integers are sent as they are.
    """
    if x.dtype not in (jnp.float16, jnp.bfloat16):
        return move(x)

    @jax.custom_jvp
    def move_bits(x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    # A bit cast has no derivative, but moving is linear.
    @move_bits.defjvp
    def move_bits_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
        return move_bits(*primals), move(*tangents)

    return move_bits(x)
