"""The results for the terminal."""

from __future__ import annotations

from rich.table import Table

from jax_skipreduce.programs.tta._methods import BASELINE
from jax_skipreduce.programs.tta._results import NUM_FINAL, NUM_SMOOTHED, Results, Summary

NOT_REACHED = "not reached"


def table(results: Results) -> Table:
    """One row per method: accuracy, step, time to the target and speed-up of each seed."""
    result = Table(title=f"{results.measurement.title}, target {results.target:.1%}", title_justify="left")
    result.add_column("method", no_wrap=True)
    for column in ("final accuracy", "step p50", "seed", "seconds to target", f"speed-up over {BASELINE}", "median"):
        result.add_column(column, justify="right")
    for summary in results.summaries:
        result.add_row(
            summary.method,
            _accuracy(summary),
            f"{summary.p50_seconds * 1e3:.0f} ms",
            "\n".join(str(outcome.seed) for outcome in summary.outcomes),
            "\n".join(_seconds(outcome.seconds_to_target) for outcome in summary.outcomes),
            "\n".join(_factor(outcome.speedup) for outcome in summary.outcomes),
            _factor(summary.speedup),
        )
    return result


def breakdown_table(results: Results) -> Table:
    """One row per method: the parts of a step."""
    result = Table(title="A step, in milliseconds", title_justify="left")
    for column in ("method", "compute", "exposed communication", "overhead", "share of communication"):
        result.add_column(column, justify="left" if column == "method" else "right")
    for name, parts in results.parts.items():
        milliseconds = (f"{part * 1e3:.1f}" for part in (parts.compute, parts.communication, parts.overhead))
        result.add_row(name, *milliseconds, f"{parts.share_of_communication:.0%}")
    return result


def remarks(results: Results) -> list[str]:
    """How the figures were obtained, and what they do not say."""
    num_seeds = len({outcome.seed for summary in results.summaries for outcome in summary.outcomes})
    spread = f"mean +- standard deviation of {num_seeds} seeds" if num_seeds > 1 else "one seed"
    lines = [
        f"Final accuracy: mean of the last {NUM_FINAL} evaluations; {spread}. Time to the target: where the mean of "
        f"{NUM_SMOOTHED} evaluations crosses it. Only training steps count, each waits for its end; the clock is "
        "worker 0's. A median needs all seeds.",
        "All methods have the same hyper-parameters, chosen with psum alone, on other seeds.",
    ]
    if results.measurement.settings.rate is None:
        lines.append(
            "Without a lab: the workers are devices of one process and share its memory. Times say nothing about "
            "slow links."
        )
    missed = [
        f"{summary.method} (seed {outcome.seed})"
        for summary in results.summaries
        for outcome in summary.outcomes
        if outcome.seconds_to_target is None
    ]
    if missed:
        lines.append(f"Did not reach the target of {results.target:.1%}: {', '.join(missed)}.")
    return lines


def _accuracy(summary: Summary) -> str:
    spread = "" if summary.spread is None else f" +- {summary.spread * 100:.1f}"
    return f"{summary.accuracy * 100:.1f}{spread} %"


def _seconds(value: float | None) -> str:
    return NOT_REACHED if value is None else f"{value:.1f}"


def _factor(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
