"""From a sum to the mean: the dtype of sums, and what sums are divided by."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp

Normalize = Literal["skip", "drop"]


def check_normalize(normalize: Any, allow_none: bool) -> None:
    """Raises ValueError if `normalize` is not a way to normalize."""
    if normalize not in (("skip", "drop", None) if allow_none else ("skip", "drop")):
        none = ", or None (the plain sum)" if allow_none else ""
        raise ValueError(
            f"normalize={normalize!r}: expected 'skip' (divide by the number of workers) or 'drop' "
            f"(divide by the number of contributors){none}"
        )


def accumulator(dtype: Any) -> Any:
    """The dtype in which values of `dtype` are added up: float32 for the 16-bit floats, else `dtype` itself."""
    return jnp.float32 if dtype in (jnp.float16, jnp.bfloat16) else dtype


def normalized(total: jax.Array, normalize: Normalize | None, num_workers: int, contributors: Any) -> jax.Array:
    """`total`, a sum over `contributors` workers, divided. Integers give floats, as in `lax.pmean`."""
    if normalize is None:
        return total
    if normalize == "skip":
        return total / num_workers
    # Small integers cannot count the workers, so total and count are cast to the dtype of their quotient first.
    dtype = jax.eval_shape(lambda x: x / 1, total).dtype
    return total.astype(dtype) / jnp.asarray(contributors).astype(dtype)
