"""Removes namespaces of a lab, whatever state they are in."""

from __future__ import annotations

from collections.abc import Sequence

from jax_skipreduce.programs.netlab._commands import ETC_NETNS, Command, LabError, execute, teardown
from jax_skipreduce.programs.netlab._processes import NETNS, kill_all


def remove_namespaces(names: Sequence[str]) -> None:
    """Kills what runs in them, then removes them and their files; goes on where something fails.

    Raises:
      LabError: something is left; the message says what.
    """
    failures = [f"process {pid} does not end" for pid in sorted(kill_all(names))]
    for step in teardown(names):
        failures += _failure(step)
    left = [str(folder / name) for name in names for folder in (NETNS, ETC_NETNS) if (folder / name).exists()]
    if left:
        raise LabError(f"could not remove {', '.join(left)}: {'; '.join(failures)}")


def _failure(step: Command) -> list[str]:
    try:
        execute(step)
    except (LabError, OSError) as error:
        return [str(error)]
    return []
