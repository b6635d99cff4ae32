"""What the runs came to: time to the target, speed-up over the baseline, final accuracy."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_skipreduce.programs.tta._breakdown import Parts, break_down
from jax_skipreduce.programs.tta._methods import BASELINE
from jax_skipreduce.programs.tta._records import Measurement, Run

# An accuracy is smoothed over so many evaluations: itself and those before it, fewer at the start.
NUM_SMOOTHED = 3

# The final accuracy is the mean of so many evaluations.
NUM_FINAL = 5


def smooth(values: Sequence[float]) -> list[float]:
    """The mean of each value and the two before it."""
    return [statistics.fmean(values[max(0, i + 1 - NUM_SMOOTHED) : i + 1]) for i in range(len(values))]


def time_to_target(seconds: Sequence[float], accuracies: Sequence[float], target: float) -> float | None:
    """When the smoothed accuracy is first at the target.

    Args:
      seconds: of training at each evaluation.
      accuracies: at each evaluation.
      target: to reach.

    Returns:
      The time at which a straight line between the two evaluations around it crosses the target; that of the first
      evaluation if it is there at once; None if it never is.
    """
    smoothed = smooth(accuracies)
    for i, value in enumerate(smoothed):
        if not value >= target:  # NaN neither
            continue
        if i == 0:
            return seconds[0]
        # Below the target before, so the two differ.
        share = (target - smoothed[i - 1]) / (value - smoothed[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])
    return None


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Outcome of one run.

    Attributes:
      seed: of the run.
      final_accuracy: mean of the last evaluations.
      final_loss: the same of the loss.
      p50_seconds, p99_seconds: of its steps.
      seconds_to_target: None: not reached.
      speedup: the baseline's time to the target with the same seed over this one's; None where one of both did not
        reach it or the baseline was not run.
    """

    seed: int
    final_accuracy: float
    final_loss: float
    p50_seconds: float
    p99_seconds: float
    seconds_to_target: float | None
    speedup: float | None


@dataclasses.dataclass(frozen=True)
class Summary:
    """Summary of one method over all seeds."""

    method: str
    outcomes: Sequence[Outcome]

    @property
    def accuracy(self) -> float:
        """Final, mean over the seeds."""
        return statistics.fmean(outcome.final_accuracy for outcome in self.outcomes)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation of the final accuracy over the seeds; None for a single one."""
        values = [outcome.final_accuracy for outcome in self.outcomes]
        return statistics.stdev(values) if len(values) > 1 else None

    @property
    def p50_seconds(self) -> float:
        """Median time of a step, median over the seeds."""
        return statistics.median(outcome.p50_seconds for outcome in self.outcomes)

    @property
    def speedup(self) -> float | None:
        """Median over the seeds; None unless all of them have one: what is not reached must not look faster."""
        values = [outcome.speedup for outcome in self.outcomes]
        return statistics.median(values) if None not in values else None  # pyright: ignore[reportArgumentType]


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of a measurement.

    Attributes:
      measurement: what they come from.
      target: the accuracy to reach.
      summaries: one per method, the baseline first.
      parts: of a step, by method; empty without a break-down.
    """

    measurement: Measurement
    target: float
    summaries: Sequence[Summary]
    parts: dict[str, Parts]


def evaluate(measurement: Measurement, target: float, methods: Sequence[str] = ()) -> Results:
    """Judges all runs by one target.

    Args:
      measurement: the runs.
      target: accuracy in (0, 1).
      methods: the order of the summaries, after the baseline; others follow in the order of the runs.
    """
    by_method: dict[str, list[Run]] = {name: [] for name in (BASELINE, *methods)}
    for run in measurement.runs:
        by_method.setdefault(run.method, []).append(run)
    baseline = {run.seed: _reached(run, target) for run in by_method[BASELINE]}
    summaries = [
        Summary(name, [_outcome(run, target, baseline) for run in sorted(runs, key=lambda run: run.seed)])
        for name, runs in by_method.items()
        if runs
    ]
    timings = measurement.timings
    return Results(measurement, target, summaries, {} if timings is None else break_down(timings))


def _reached(run: Run, target: float) -> float | None:
    return time_to_target([e.seconds for e in run.evaluations], [e.accuracy for e in run.evaluations], target)


def _outcome(run: Run, target: float, baseline: dict[int, float | None]) -> Outcome:
    last, seconds, reference = run.evaluations[-NUM_FINAL:], _reached(run, target), baseline.get(run.seed)
    return Outcome(
        seed=run.seed,
        final_accuracy=statistics.fmean(e.accuracy for e in last),
        final_loss=statistics.fmean(e.loss for e in last),
        p50_seconds=float(np.percentile(run.step_seconds, 50)),
        p99_seconds=float(np.percentile(run.step_seconds, 99)),
        seconds_to_target=seconds,
        speedup=None if seconds is None or reference is None else reference / seconds,
    )


def as_json(results: Results) -> dict[str, Any]:
    """Everything that was measured and computed, as plain data."""
    measurement = results.measurement
    return {
        **measurement.header,
        "target": results.target,
        "time_to_target": f"where the mean of {NUM_SMOOTHED} evaluations crosses the target, interpolated linearly",
        "methods": {
            summary.method: {
                "final_accuracy": summary.accuracy,
                "final_accuracy_stdev": summary.spread,
                "p50_step_seconds": summary.p50_seconds,
                "median_speedup": summary.speedup,
                "seeds": [dataclasses.asdict(outcome) for outcome in summary.outcomes],
            }
            for summary in results.summaries
        },
        "breakdown": {
            name: dataclasses.asdict(parts) | {"share_of_communication": parts.share_of_communication}
            for name, parts in results.parts.items()
        },
        "timings": None if measurement.timings is None else dataclasses.asdict(measurement.timings),
        "runs": [dataclasses.asdict(run) for run in measurement.runs],
    }
