"""What is compared: `lax.psum`, and ring or native kernels with each number of skipped steps, mode and wire dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

import jax_skipreduce as sr
from jax_skipreduce.programs.bench._settings import DType, Mode, Settings

AXIS = "data"

# Of one worker: its message and the shift -> the sum, the same on all workers.
Reduce = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to add up a message over the workers.

    Attributes:
      algorithm: ``"psum"``; ``"psum-bf16"``, which casts, calls psum and casts back; ``"ring"``; or ``"native"``.
      wire_dtype: what is asked to travel. (What XLA makes of a psum is for `_measure` to find out.)
      num_skipped: k. Zero for psum.
      mode: of what skips; None for psum.
    """

    algorithm: Literal["psum", "psum-bf16", "ring", "native"]
    wire_dtype: DType
    num_skipped: int = 0
    mode: Mode | None = None

    @property
    def is_shifted(self) -> bool:
        """Whether the shift makes a difference."""
        return self.mode == Mode.RANDOM

    @property
    def name(self) -> str:
        """For messages and progress."""
        if self.mode is None:
            return self.algorithm
        return f"{self.algorithm} k={self.num_skipped} {self.mode.value} {self.wire_dtype.value}"


def make_candidates(settings: Settings) -> tuple[Candidate, ...]:
    """All candidates that the settings name. The first is plain psum, which others are compared to."""
    baseline = Candidate("psum", settings.dtype)
    cast = [Candidate("psum-bf16", DType.BFLOAT16)] if is_rounded(settings) else []
    rings = [
        Candidate(algorithm.value, wire, num_skipped, mode)
        for algorithm in settings.algorithms
        for wire in settings.wire_dtypes
        for num_skipped in settings.skips
        for mode in (settings.modes if num_skipped else (Mode.STATIC,))  # nothing moves
    ]
    return (baseline, *cast, *rings)


def is_rounded(settings: Settings) -> bool:
    """Whether there are candidates that send bfloat16 for float32."""
    return settings.dtype == DType.FLOAT32 and DType.BFLOAT16 in settings.wire_dtypes


def reduction(candidate: Candidate, dtype: DType) -> Reduce:
    """The function that a candidate names, to be run under the axis `AXIS` on a message of `dtype`."""
    is_cast = candidate.wire_dtype != dtype
    if candidate.mode is None:

        def psum(message: jax.Array, shift: jax.Array) -> jax.Array:
            del shift
            wire = message.astype(jnp.dtype(candidate.wire_dtype.value)) if is_cast else message
            return lax.psum(wire, AXIS).astype(message.dtype)

        return psum

    def skipping(message: jax.Array, shift: jax.Array) -> jax.Array:
        # Random: an operand, new in every call, as skipreduce has it. So one program serves all shifts.
        options: dict[str, Any] = {"shift": shift if candidate.is_shifted else 0}
        options["backend"] = "native" if candidate.algorithm == "native" else "xla"
        if candidate.num_skipped == 0:
            options["shift"] = -1  # as skipreduce has it: where nothing moves, slices are where they belong
        if is_cast:
            options["wire_dtype"] = candidate.wire_dtype.value
        return sr.all_reduce(message, AXIS, num_skipped=candidate.num_skipped, normalize=None, **options)

    return skipping
