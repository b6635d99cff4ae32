"""How far a size is, on a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jax_skipreduce.programs.bench._measure import OnProgress


@contextlib.contextmanager
def shown(title: str, is_shown: bool) -> Iterator[OnProgress]:
    """A function to report progress to, which shows it on stderr if that is a terminal, and removes it at the end."""
    # Not at the top: only a person at a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield _say_nothing
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[what]}"),
        TimeElapsedColumn(),
    )
    # Drawn now and then from here, because a thread of its own would take time from what is measured.
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task(title, total=None, what="")

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, what=what, refresh=True)

        yield report


def _say_nothing(what: str, done: int, total: int) -> None:
    del what, done, total
