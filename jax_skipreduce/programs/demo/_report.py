"""What the two trainings came to: figures, computed once, for the terminal, the picture and the JSON file."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from rich.table import Table

import jax_skipreduce as sr
from jax_skipreduce.programs.common.machine import versions
from jax_skipreduce.programs.demo._settings import Settings
from jax_skipreduce.programs.demo._training import Run


@dataclasses.dataclass(frozen=True)
class Method:
    """The runs of one method, one per seed, and what a worker sends in each.

    Attributes:
      name: as tables and legends call it.
      runs: one per seed.
      sent_bytes: by one worker over one run.
    """

    name: str
    runs: Sequence[Run]
    sent_bytes: int

    @property
    def test_accuracy(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(run.final_accuracy for run in self.runs)

    @property
    def final_loss(self) -> float:
        """Mean over the seeds."""
        return statistics.fmean(run.final_loss for run in self.runs)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Full reduction against skipping.

    Attributes:
      settings: of both.
      description: what `jax_skipreduce.describe` says of them.
      full_runs: with full reduction, one per seed.
      skipping_runs: with skipping, the same seeds.
    """

    settings: Settings
    description: sr.Description
    full_runs: Sequence[Run]
    skipping_runs: Sequence[Run]

    @property
    def full(self) -> Method:
        """The method that skips nothing."""
        return Method("full reduction", self.full_runs, self.description.full_wire_bytes * self.settings.num_steps)

    @property
    def skipping(self) -> Method:
        """The method that is to be judged."""
        name = skipping_name(self.settings)
        return Method(name, self.skipping_runs, self.description.wire_bytes * self.settings.num_steps)

    @property
    def share_of_bytes_saved(self) -> float:
        """Share of the bytes of full reduction that skipping does not send."""
        return 1 - self.skipping.sent_bytes / self.full.sent_bytes

    @property
    def share_left_out(self) -> float:
        """Share of its gradient that each worker leaves out in each step."""
        return self.description.num_skipped_elements / self.description.num_elements


def skipping_name(settings: Settings) -> str:
    """What tables, bars and legends call the second method."""
    return f"skipping {settings.skip_ratio * 100:.4g} % ({settings.mode.value})"


def notes(settings: Settings, description: sr.Description, devices: Sequence[Any], num_wanted: int) -> list[str]:
    """What the user should know before it starts: where it is not quite what was asked for."""
    result = []
    if len(devices) < num_wanted:
        kind = f"{devices[0].platform.upper()} devices"
        result.append(f"Note: JAX has {len(devices)} {kind}, so there are {len(devices)} workers, not {num_wanted}.")
    if settings.skip_ratio > 0 and description.num_skipped == 0:
        result.append(
            f"Note: a skip ratio of {settings.skip_ratio:.4g} with {settings.num_workers} workers rounds to 0 steps, "
            f"so nothing is skipped; one step is a ratio of {1 / settings.num_workers:.4g}."
        )
    return result


def table(comparison: Comparison) -> Table:
    """The comparison for the terminal."""
    full, skipping, description = comparison.full, comparison.skipping, comparison.description
    steps, saved = description.num_workers - 1, comparison.share_of_bytes_saved
    seeds = len(comparison.settings.seeds)
    mean = f" (mean of {seeds} seeds)" if seeds > 1 else ""
    skipped = 0 if comparison.settings.mode == "dropout" else description.num_skipped
    points = (skipping.test_accuracy - full.test_accuracy) * 100

    result = Table(title=_title(comparison.settings), title_justify="left", title_style="bold")
    result.add_column()
    for name in (full.name, skipping.name, "difference"):
        result.add_column(name, justify="right")
    result.add_row(
        f"test accuracy{mean}", _percent(full.test_accuracy), _percent(skipping.test_accuracy), f"{points:+.1f} points"
    )
    if seeds > 1:
        result.add_row("  lowest and highest", _range(full), _range(skipping), "")
    loss = skipping.final_loss - full.final_loss
    result.add_row(
        "training loss, last 20 steps", f"{full.final_loss:.4f}", f"{skipping.final_loss:.4f}", f"{loss:+.4f}"
    )
    result.add_section()
    result.add_row("reduce-scatter steps", f"{steps}", f"{steps - skipped}", f"{-skipped:+d}")
    result.add_row(
        "sent per worker over the run",
        _megabytes(full.sent_bytes),
        _megabytes(skipping.sent_bytes),
        f"{-saved * 100:+.1f} %",
    )
    result.add_row("gradient left out per step", "0.0 %", _percent(comparison.share_left_out), "")
    result.add_row("all-reduce in theory", "", f"{description.theoretical_speedup:.2f}x faster", "")
    return result


def remark(devices: Sequence[Any]) -> str:
    """What wall time says on this machine."""
    workers = f"{len(devices)} workers"
    if devices[0].platform == "cpu":
        return (
            f"The {workers} are simulated on one machine and share its memory, so the time that the trainings took "
            "does not show what is saved: bytes and speed-up follow from the schedule of the all-reduce."
        )
    return (
        f"The {workers} are devices of one machine ({devices[0].device_kind}); bytes and speed-up follow from the "
        "schedule of the all-reduce and show where links between the workers are slow."
    )


def as_json(comparison: Comparison, devices: Sequence[Any]) -> dict[str, Any]:
    """The figures of the table, the settings, the versions and the curves, as plain data."""
    description = comparison.description
    return {
        "settings": dataclasses.asdict(comparison.settings),
        "versions": versions("jax", "jaxlib", "flax", "optax", "numpy"),
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "num_devices": len(devices),
        },
        "per_step": {
            "num_reduce_scatter_steps": description.num_workers - 1,
            "num_skipped": description.num_skipped,
            "num_buckets": description.num_buckets,
            "num_parameters": description.num_elements,
            "num_skipped_elements": description.num_skipped_elements,
            "full_wire_bytes": description.full_wire_bytes,
            "wire_bytes": description.wire_bytes,
        },
        "full_reduction": _method_as_json(comparison.full),
        "skipping": _method_as_json(comparison.skipping),
        "share_of_bytes_saved": comparison.share_of_bytes_saved,
        "share_of_gradient_left_out": comparison.share_left_out,
        "theoretical_speedup": description.theoretical_speedup,
        "accuracy_difference": comparison.skipping.test_accuracy - comparison.full.test_accuracy,
    }


def _method_as_json(method: Method) -> dict[str, Any]:
    return {
        "test_accuracy": method.test_accuracy,
        "final_training_loss": method.final_loss,
        "sent_bytes_per_worker": method.sent_bytes,
        "runs": [
            {
                "seed": run.seed,
                "test_accuracy": run.final_accuracy,
                "final_training_loss": run.final_loss,
                "seconds": run.seconds,
                "curves": {
                    "training_loss": list(run.losses),
                    "evaluated_steps": list(run.evaluated_steps),
                    "test_accuracy": list(run.accuracies),
                },
            }
            for run in method.runs
        ],
    }


def _title(settings: Settings) -> str:
    return f"{settings.data.value}, {settings.num_workers} workers, {settings.num_steps} steps"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _range(method: Method) -> str:
    accuracies = [run.final_accuracy for run in method.runs]
    return f"{min(accuracies) * 100:.1f}-{max(accuracies) * 100:.1f} %"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"
