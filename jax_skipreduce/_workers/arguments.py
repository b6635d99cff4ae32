"""Checks of arguments of collectives: dtypes, and integers that all workers have to agree on."""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_skipreduce._workers.axes import varying_axes
from jax_skipreduce._workers.group import Group

_SUPPORTED = (
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)


def check_dtype(dtype: Any, what: str) -> None:
    """Raises TypeError, naming `what`, if values of `dtype` cannot be reduced."""
    extended = jnp.issubdtype(dtype, jax.dtypes.extended)  # PRNG keys: no NumPy dtype
    if extended or jnp.dtype(dtype).name not in _SUPPORTED:
        raise TypeError(f"{what} has dtype {dtype}, which cannot be reduced. Cast it to one of {', '.join(_SUPPORTED)}")


def checked_integer(name: str, value: Any, group: Group) -> int | jax.Array:
    """`value` as a Python int, or as a traced integer of 32 or 64 bits that is the same on all workers."""
    if isinstance(value, Tracer):
        if not jnp.issubdtype(value.dtype, jnp.integer) or value.shape != ():
            raise TypeError(f"{name} has type {jax.typeof(value)}: expected an integer scalar, such as int32[]")
        varying = sorted(map(str, varying_axes(value) & set(group.names)))
        if varying:
            raise ValueError(
                f"{name} varies over {', '.join(varying)}: workers that disagree on it wait for each other "
                "for ever. Compute it from values that all workers share, such as a step counter"
            )
        return value if value.dtype.itemsize >= 4 else value.astype(jnp.int32)
    if isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected an integer")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected an integer") from None


def checked_shift(name: str, value: Any, group: Group) -> int | jax.Array:
    """`value` as a shift: any integer, modulo N. An int, or a traced int32."""
    shift = checked_integer(name, value, group)
    if isinstance(shift, int):
        return shift % group.size
    # Modulo N before anything is added: 2**32 is no multiple of N, so a shift that overflows would be another shift.
    return (shift % jnp.asarray(group.size, shift.dtype)).astype(jnp.int32)


def checked_count(name: str, value: Any, group: Group, most: int | None = None) -> int | jax.Array:
    """`value` as a number of skipped steps: checked if it is known, clamped to 0..most if it is traced.

    ``most=None`` means N-1.
    """
    most = group.size - 1 if most is None else most
    steps = checked_integer(name, value, group)
    if isinstance(steps, int):
        if not 0 <= steps <= most:
            raise ValueError(f"{name}={steps}: expected 0..{most} for {group.size} workers")
        return steps
    return jnp.clip(steps, 0, most).astype(jnp.int32)
