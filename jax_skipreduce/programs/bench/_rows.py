"""From seconds to the numbers of the table: one row per candidate and size. docs/bench.md derives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jax_skipreduce._topologies.ring import RING
from jax_skipreduce.programs.bench._candidates import is_method, method
from jax_skipreduce.programs.bench._measure import Measurement
from jax_skipreduce.programs.bench._settings import DType

REDOP = "sum"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table, and one record of the JSON file.

    Attributes:
      size_bytes: of the message of one worker.
      count: its elements.
      dtype: of these.
      redop: what is done with them: sum, or mean for a method of the library.
      algorithm: psum, psum-bf16 (cast, psum, cast back), ring, native, or the name of a method of the library.
      num_skipped: k.
      skip_ratio: k / N.
      mode: of what skips; None for psum, and for a method of the library.
      wire_dtype: what travels.
      wire_bytes: that one worker sends, by the schedule of the ring, or as the method describes it.
      p50_us, p99_us: of the time of one call, over the rounds.
      algbw_gbps: size_bytes over the median time, in 10^9 bytes per second.
      busbw_gbps: wire_bytes over the median time, in 10^9 bytes per second.
      num_wrong: elements that are not what they have to be; None: not checked.
      speedup: median over the rounds of (time of psum / time of this one) within the round.
      speedup_p10, speedup_p90: the same, of which a tenth of the rounds is below and above.
      theoretical_speedup: wire_bytes of psum over wire_bytes.
      efficiency: speedup / theoretical_speedup.
      times_us: of each round.
    """

    size_bytes: int
    count: int
    dtype: str
    redop: str
    algorithm: str
    num_skipped: int
    skip_ratio: float
    mode: str | None
    wire_dtype: str
    wire_bytes: int
    p50_us: float
    p99_us: float
    algbw_gbps: float
    busbw_gbps: float
    num_wrong: int | None
    speedup: float
    speedup_p10: float
    speedup_p90: float
    theoretical_speedup: float
    efficiency: float
    times_us: tuple[float, ...]

    @property
    def is_method(self) -> bool:
        """Whether it is of a method of the library, whose result is no exact sum."""
        return is_method(self.algorithm)

    def as_json(self, with_times: bool) -> dict[str, Any]:
        """The row as a record. Times of single rounds are many, so they are optional."""
        record = dataclasses.asdict(self)
        times = record.pop("times_us")
        return record | {"times_us": times} if with_times else record


def wire_bytes(count: int, num_workers: int, num_skipped: int, wire_dtype: DType) -> int:
    """Bytes that each worker sends, by the schedule of the ring."""
    slice_size = -(-count // num_workers)
    return RING.slices_sent(num_workers, num_skipped) * slice_size * wire_dtype.itemsize


def make_rows(size_bytes: int, dtype: DType, num_workers: int, measurements: Sequence[Measurement]) -> list[Row]:
    """The rows of one size. The first measurement is of what others are compared to."""
    count = size_bytes // dtype.itemsize
    baseline = measurements[0]
    baseline_bytes = wire_bytes(count, num_workers, baseline.candidate.num_skipped, baseline.wire_dtype)
    rows = []
    for measurement in measurements:
        candidate, seconds = measurement.candidate, measurement.seconds
        wire_dtype = measurement.wire_dtype.value
        if candidate.is_method:
            description = method(candidate).describe(jax.ShapeDtypeStruct((count,), dtype.value), num_workers)
            (leaf,) = description.leaves
            sent_bytes, wire_dtype = leaf.wire_bytes, leaf.wire_dtype
        else:
            sent_bytes = wire_bytes(count, num_workers, candidate.num_skipped, measurement.wire_dtype)
        p50, p99 = np.percentile(seconds, [50, 99]).tolist()
        # Within a round, so that what slows down a whole round slows down both.
        low, speedup, high = np.percentile(baseline.seconds / seconds, [10, 50, 90]).tolist()
        theory = baseline_bytes / sent_bytes
        rows.append(
            Row(
                size_bytes=size_bytes,
                count=count,
                dtype=dtype.value,
                redop="mean" if candidate.is_method else REDOP,
                algorithm=candidate.algorithm,
                num_skipped=candidate.num_skipped,
                skip_ratio=candidate.num_skipped / num_workers,
                mode=None if candidate.mode is None else candidate.mode.value,
                wire_dtype=wire_dtype,
                wire_bytes=sent_bytes,
                p50_us=p50 * 1e6,
                p99_us=p99 * 1e6,
                algbw_gbps=size_bytes / p50 / 1e9,
                busbw_gbps=sent_bytes / p50 / 1e9,
                num_wrong=measurement.num_wrong,
                speedup=speedup,
                speedup_p10=low,
                speedup_p90=high,
                theoretical_speedup=theory,
                efficiency=speedup / theory,
                times_us=tuple((seconds * 1e6).tolist()),
            )
        )
    return rows
