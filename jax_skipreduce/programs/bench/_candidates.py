"""What is compared: `lax.psum`, the ring or native kernels for each k, mode and wire dtype, and methods by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import jax_skipreduce as sr
from jax_skipreduce.programs.bench._settings import Algorithm, DType, Mode, Settings
from jax_skipreduce.programs.common import methods

AXIS = "data"

_OWN = ("psum", "psum-bf16", *(algorithm.value for algorithm in Algorithm))

# Of one worker: its message and the shift -> the sum, the same on all workers.
Reduce = Callable[[jax.Array, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to add up a message over the workers.

    Attributes:
      algorithm: ``"psum"``; ``"psum-bf16"``, which casts, calls psum and casts back; ``"ring"``; ``"native"``; or the
        name of a method of the library.
      wire_dtype: what is asked to travel. (What XLA makes of a psum is for `_measure` to find out.)
      num_skipped: k. Zero for psum, and for a method of the library.
      mode: of what skips; None for psum, and for a method of the library.
    """

    algorithm: str
    wire_dtype: DType
    num_skipped: int = 0
    mode: Mode | None = None

    @property
    def is_method(self) -> bool:
        """Whether it is a method of the library, whose result is no exact sum."""
        return is_method(self.algorithm)

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
        Candidate(algorithm, wire, num_skipped, mode)
        for algorithm in settings.algorithms
        if not is_method(algorithm)
        for wire in settings.wire_dtypes
        for num_skipped in settings.skips
        for mode in (settings.modes if num_skipped else (Mode.STATIC,))  # nothing is skipped: one row
    ]
    by_name = [Candidate(algorithm, settings.dtype) for algorithm in settings.algorithms if is_method(algorithm)]
    return (baseline, *cast, *rings, *by_name)


def is_method(algorithm: str) -> bool:
    """Whether an algorithm is a method of the library, not one of the benchmark's own."""
    return algorithm not in _OWN


def method(candidate: Candidate) -> Any:
    """The library's method that a candidate names, for messages of any size."""
    return methods.make(candidate.algorithm, AXIS, min_size=1)


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
        # A random shift is an operand, new in every call, as in skipreduce. So one program serves all shifts.
        options: dict[str, Any] = {"shift": shift if candidate.is_shifted else 0}
        options["backend"] = "native" if candidate.algorithm == "native" else "xla"
        if candidate.num_skipped == 0:
            options["shift"] = -1  # as in skipreduce: then no slice moves
        if is_cast:
            options["wire_dtype"] = candidate.wire_dtype.value
        return sr.all_reduce(message, AXIS, num_skipped=candidate.num_skipped, normalize=None, **options)

    return skipping
