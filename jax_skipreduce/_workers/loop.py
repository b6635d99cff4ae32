"""Steps, one after the other or as a loop of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax

# Up to so many steps stand one after the other in the program; more steps become a loop. So the size of the
# program, and the time to compile it, do not grow with the number of workers.
MAX_UNROLLED_STEPS = 16


def loop(start: int | jax.Array, stop: int | jax.Array, body: Callable, carry: Any) -> Any:
    """`body(step, carry)` for start <= step < stop: unrolled, or a loop in the program where that is shorter."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= MAX_UNROLLED_STEPS:
        for step in range(start, stop):
            carry = body(step, carry)
        return carry
    # NumPy's int32 keeps known bounds known, so that the loop can be differentiated in reverse.
    first, end = (np.int32(bound) if isinstance(bound, int) else bound for bound in (start, stop))
    return lax.fori_loop(first, end, body, carry)
