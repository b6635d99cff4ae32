"""Makes all runs of a comparison, one after the other, and shows how far they are."""

from __future__ import annotations

from collections.abc import Callable

import optax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jax_skipreduce.programs.demo._report import Comparison, skipping_name
from jax_skipreduce.programs.demo._settings import Settings
from jax_skipreduce.programs.demo._training import Run, Trainer, full_reduction, skipping


def compare(trainer: Trainer, settings: Settings, console: Console) -> Comparison:
    """Trains with both methods, once per seed."""
    methods: tuple[tuple[str, Callable[[int], optax.GradientTransformation]], ...] = (
        ("full reduction", lambda _: full_reduction()),
        (skipping_name(settings), lambda seed: skipping(settings, seed).transform()),
    )
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TimeElapsedColumn(),
    )
    runs: tuple[list[Run], list[Run]] = ([], [])
    with Progress(*columns, console=console) as progress:
        for seed in settings.seeds:
            for (name, reduction), results in zip(methods, runs, strict=True):
                label = name if len(settings.seeds) == 1 else f"{name}, seed {seed}"
                task = progress.add_task(label, total=settings.num_steps, state="compiling")
                results.append(trainer.run(reduction(seed), seed, _updater(progress, task)))
    return Comparison(settings, trainer.describe(), *runs)


def _updater(progress: Progress, task: TaskID) -> Callable[[int, float, float | None], None]:
    def update(step: int, loss: float, accuracy: float | None) -> None:
        state = f"loss {loss:.4f}" + ("" if accuracy is None else f"  accuracy {accuracy:6.1%}")
        progress.update(task, completed=step, state=state)

    return update
