"""Runs the candidates on messages of one size: compiles them, checks their results, then times them in turns."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import jax_skipreduce as sr
from jax_skipreduce.programs.bench import _check, _workers
from jax_skipreduce.programs.bench._candidates import AXIS, Candidate, Reduce, method, reduction
from jax_skipreduce.programs.bench._settings import DType, Settings
from jax_skipreduce.programs.common import methods

# Shifts at which a candidate with a random one is checked: more would take longer than the timing.
_MAX_CHECKED_SHIFTS = 4

_ALL_REDUCE = re.compile(r"= \(?(f32|bf16)\[[^=]*? all-reduce(?:-start)?\(")
_HLO_DTYPES = {"f32": DType.FLOAT32, "bf16": DType.BFLOAT16}

# Called with what is done now, and with the number of calls made and to be made in all.
OnProgress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What was measured of one candidate, at one size.

    Attributes:
      candidate: what was measured.
      wire_dtype: what travels. For psum: the dtype of the all-reduce in XLA's program, if it shows one.
      seconds: of each round, shape (num_rounds,): of the slowest process.
      num_wrong: elements that are not what they have to be, over all workers and all results that were
        checked; None if none was, as for methods of the library, whose results are no exact sums.
    """

    candidate: Candidate
    wire_dtype: DType
    seconds: np.ndarray
    num_wrong: int | None


class Bench:
    """Holds what sizes share. `measure` does one size.

    Args:
      settings: of the run.
      candidates: the first is what others are compared to.
      devices: one per worker.

    Raises:
      ValueError: results cannot be checked with so many workers.
    """

    def __init__(self, settings: Settings, candidates: Sequence[Candidate], devices: Sequence[Any]) -> None:
        self._settings, self._candidates = settings, tuple(candidates)
        self._num_workers = len(devices)
        axis_types = (jax.sharding.AxisType.Auto,)
        self._mesh = jax.make_mesh((len(devices),), (AXIS,), axis_types=axis_types, devices=devices)
        dtypes = {settings.dtype, *(candidate.wire_dtype for candidate in candidates)}
        # Where nothing is checked, any message will do.
        self._pattern = _check.Pattern(len(devices), dtypes if settings.is_checked else {DType.FLOAT32}, settings.seed)
        self._shifts = [self._replicated(np.int32(shift)) for shift in range(len(devices))]
        self._barrier = self._make_barrier()

    def measure(self, size_bytes: int, on_progress: OnProgress) -> list[Measurement]:
        """All candidates on messages of `size_bytes`, in the order they were given."""
        settings = self._settings
        num_elements = size_bytes // settings.dtype.itemsize
        message = self._make_message(num_elements)
        # The same on all processes, which have to run the same programs in the same order.
        rng = np.random.default_rng((settings.seed, size_bytes))
        num_calls = len(self._candidates) * (settings.num_warmup_rounds + settings.num_rounds)
        runs, wire_dtypes, num_wrong = [], [], []
        for number, candidate in enumerate(self._candidates):
            on_progress(f"compiling {number + 1} of {len(self._candidates)}, {candidate.name}", 0, num_calls)
            if candidate.is_method:
                run = self.compile_method(candidate, message, num_elements)
            else:
                run = self.compile(reduction(candidate, settings.dtype), message)
            runs.append(run)
            wire_dtypes.append(_wire_dtype(candidate, run.as_text()))
            if settings.is_checked:
                num_wrong.append(
                    0 if candidate.is_method else self._count_wrong(run, candidate, message, num_elements, rng)
                )
        seconds = self._time(runs, message, rng, lambda done: on_progress("timing", done, num_calls))
        slowest = _workers.gather(seconds).max(axis=0)
        wrong: list[int | None] = [None] * len(runs)
        if settings.is_checked:
            counts = _workers.gather(np.asarray(num_wrong, np.int64)).sum(axis=0).tolist()
            wrong = [
                None if candidate.is_method else count
                for candidate, count in zip(self._candidates, counts, strict=True)
            ]
        return [Measurement(*one) for one in zip(self._candidates, wire_dtypes, slowest, wrong, strict=True)]

    def compile(self, reduce: Reduce, message: jax.Array) -> Any:
        """The program of (message, shift) -> the sum, which it says is the same on all workers."""
        specs = (PartitionSpec(AXIS), PartitionSpec())
        mapped = jax.shard_map(reduce, mesh=self._mesh, in_specs=specs, out_specs=PartitionSpec())
        # Nothing is donated, because all candidates share one message.
        return jax.jit(mapped).lower(message, self._shifts[0]).compile()

    def compile_method(self, candidate: Candidate, message: jax.Array, num_elements: int) -> _Stateful:
        """The program of a method of the library, with its state before the first call."""
        tx = method(candidate).transform()
        params = jax.ShapeDtypeStruct((num_elements,), message.dtype)
        state = methods.init(tx, params, self._mesh)
        specs = sr.state_specs(state, AXIS)
        state = methods.place(state, specs, self._mesh)
        mapped = jax.shard_map(
            tx.update, mesh=self._mesh, in_specs=(PartitionSpec(AXIS), specs), out_specs=(PartitionSpec(), specs)
        )
        return _Stateful(jax.jit(mapped).lower(message, state).compile(), state)

    def _make_message(self, num_elements: int) -> jax.Array:
        """The messages of all workers, end to end, each on its own device."""
        return self._stacked(num_elements, lambda rank: self._pattern.message(rank, num_elements, self._settings.dtype))

    def _stacked(self, num_elements: int, local: Callable[[int], np.ndarray]) -> jax.Array:
        """What `local` gives for each rank, end to end."""

        def shard(index: Any) -> np.ndarray:
            return local((index[0].start or 0) // num_elements)

        sharding = NamedSharding(self._mesh, PartitionSpec(AXIS))
        return jax.make_array_from_callback((self._num_workers * num_elements,), sharding, shard)

    def _replicated(self, value: Any) -> jax.Array:
        sharding = NamedSharding(self._mesh, PartitionSpec())
        return jax.make_array_from_callback(np.shape(value), sharding, lambda _: value)

    def _make_barrier(self) -> Callable[[], None]:
        """A function that returns once all workers have called it."""
        token = self._stacked(1, lambda _: np.zeros(1, np.int32))
        meet = self.compile(lambda token, _: lax.psum(token, AXIS), token)
        return lambda: meet(token, self._shifts[0]).block_until_ready()

    def _count_wrong(
        self, run: Any, candidate: Candidate, message: jax.Array, num_elements: int, rng: np.random.Generator
    ) -> int:
        """Wrong elements on the workers of this process, at all shifts that are tried."""
        shifts = [0]
        if candidate.is_shifted:
            shifts = sorted(rng.permutation(self._num_workers)[:_MAX_CHECKED_SHIFTS].tolist())
        total = 0
        for shift in shifts:
            expected = self._pattern.expected(num_elements, self._settings.dtype, candidate.num_skipped, shift)
            total += _check.count_wrong(run(message, self._shifts[shift]), expected)
        return total

    def _time(
        self, runs: Sequence[Any], message: jax.Array, rng: np.random.Generator, on_call: Callable[[int], None]
    ) -> np.ndarray:
        """Seconds of this process, shape (number of candidates, number of rounds)."""
        num_warmup = self._settings.num_warmup_rounds
        seconds = np.zeros((len(runs), num_warmup + self._settings.num_rounds))
        for number in range(seconds.shape[1]):
            shifts = rng.integers(self._num_workers, size=len(runs))
            for done, index in enumerate(rng.permutation(len(runs))):
                shift = self._shifts[shifts[index]]
                # Else a worker that is late from the last candidate would be waited for in this one.
                self._barrier()
                start = time.perf_counter()
                result = jax.block_until_ready(runs[index](message, shift))
                seconds[index, number] = time.perf_counter() - start
                del result  # its memory goes back before the next one starts
                on_call(number * len(runs) + done + 1)
        return seconds[:, num_warmup:]


class _Stateful:
    """A compiled program of (message, state), called like those of (message, shift). It goes on from its last state."""

    def __init__(self, program: Any, state: Any) -> None:
        self._program, self._state = program, state

    def as_text(self) -> str:
        """Text of the program."""
        return self._program.as_text()

    def __call__(self, message: jax.Array, shift: jax.Array) -> Any:
        """The mean, and the state after it."""
        del shift
        mean, self._state = self._program(message, self._state)
        return mean, self._state


def _wire_dtype(candidate: Candidate, program: str) -> DType:
    """What travels: for psum XLA's choice, which widens bfloat16 on some backends."""
    # A backend may have its own way to write an all-reduce; then what was asked for is all that is known.
    is_psum = candidate.mode is None and not candidate.is_method
    found = _ALL_REDUCE.search(program) if is_psum else None
    return candidate.wire_dtype if found is None else _HLO_DTYPES[found[1]]
