"""Checks of plain numbers that users pass as settings."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raises TypeError or ValueError, naming the argument, if `value` is no int in least..most."""
    if isinstance(value, (Tracer, jax.Array)):
        raise TypeError(f"{name} is an array: expected an int. Under optax.inject_hyperparams, name it in static_args")
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected an int")
    if value < least or (most is not None and value > most):
        raise ValueError(f"{name}={value}: expected {least} or more" + (f", up to {most}" if most is not None else ""))
