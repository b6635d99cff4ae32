"""What was measured, as plain data, and the file that it is kept in: one JSON object per line.

The first line says what was measured and where; each run, and the break-down, is a line that is written as soon as
it is there. So a measurement that was stopped can go on.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_skipreduce.programs.common.machine import cpu_name, versions
from jax_skipreduce.programs.common.records import finite
from jax_skipreduce.programs.tta._settings import Settings


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Scores on the test examples.

    Attributes:
      step: after so many steps.
      seconds: of training until then, on the clock of worker 0; evaluations do not count.
      accuracy: share of images, or of bytes, that were predicted.
      loss: mean cross-entropy.
      train_loss: mean over the workers, and over the steps since the evaluation before.
    """

    step: int
    seconds: float
    accuracy: float
    loss: float
    train_loss: float

    def at(self, seconds: float) -> Evaluation:
        """The same, with another time."""
        return dataclasses.replace(self, seconds=seconds)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
      method: its name.
      seed: of shards, initial parameters, order of examples, and shifts.
      position: how many runs of this seed came before.
      step_seconds: of each step, on the clock of worker 0, which waits for the end of each.
      evaluations: in order.
      initial_checksum, final_checksum: of the parameters, which are the same bits on all workers.
      batches_checksum: of what all workers learnt from.
    """

    method: str
    seed: int
    position: int
    step_seconds: tuple[float, ...]
    evaluations: tuple[Evaluation, ...]
    initial_checksum: str
    batches_checksum: str
    final_checksum: str


@dataclasses.dataclass(frozen=True)
class Timings:
    """Steps timed for the break-down, in seconds, each until the last worker was done.

    Attributes:
      compute: gradients straight to the optimizer.
      step: by method, the whole step.
      local: by method, the step with nothing on the wire.
    """

    compute: tuple[float, ...]
    step: Mapping[str, tuple[float, ...]]
    local: Mapping[str, tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class Measurement:
    """All of one workload over links of one rate.

    Attributes:
      header: settings, machine, versions, size of the network.
      runs: in the order in which they were made.
      timings: None before they are there.
    """

    header: Mapping[str, Any]
    runs: Sequence[Run]
    timings: Timings | None

    @property
    def settings(self) -> Settings:
        """Settings of the first start. Methods and seeds are those that there are runs of."""
        return Settings.from_json(json.dumps(self.header["settings"]))

    @property
    def title(self) -> str:
        """One line for tables and figures."""
        settings = self.settings
        where = f"links of {settings.rate}" if settings.rate else "devices of one process, no links"
        workers = f"{settings.num_workers} workers, batches of {settings.batch_size} on each"
        return f"{settings.workload}, {workers}, {where}, {settings.num_steps} steps"


def make_header(settings: Settings, num_parameters: int) -> dict[str, Any]:
    """The first line of a file."""
    return {
        "kind": "header",
        "settings": dataclasses.asdict(settings),
        "fingerprint": settings.fingerprint(),
        "in_lab": settings.rate is not None,
        "num_parameters": num_parameters,
        "gradient_bytes": 4 * num_parameters,
        "machine": {"system": platform.platform(), "processor": cpu_name(), "num_cores": os.cpu_count()},
        "versions": versions("jax", "jaxlib", "flax", "optax", "numpy"),
    }


def as_line(record: Run | Timings) -> dict[str, Any]:
    """What is written for a record."""
    return {"kind": "run" if isinstance(record, Run) else "timings"} | dataclasses.asdict(record)


def open_file(path: Path, settings: Settings, header: Mapping[str, Any]) -> list[Run]:
    """Makes a file ready for more lines.

    With `Settings.resume` a file that is there is kept, else it gets another name.

    Returns:
      The runs that it holds already.

    Raises:
      ValueError: it holds runs with other settings.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and settings.resume:
        check_resumable(path, settings)
        kept = complete_lines(path)
        # In one go: what is there must not be lost to a stop right here.
        whole = path.with_suffix(".tmp")
        whole.write_text("".join(json.dumps(line) + "\n" for line in kept))
        whole.replace(path)
        return list(read(path).runs)
    if path.exists():
        path.rename(next(other for n in itertools.count(1) if not (other := Path(f"{path}.{n}")).exists()))
    append(path, header)
    return []


def check_resumable(path: Path, settings: Settings) -> None:
    """Raises ValueError if the runs in the file at `path` cannot be compared with runs of these settings."""
    before, now = read(path).header.get("fingerprint", {}), json.loads(json.dumps(settings.fingerprint()))
    other = [f"{name}={before.get(name)!r}, not {value!r}" for name, value in now.items() if before.get(name) != value]
    if other:
        raise ValueError(f"{path} has runs with {'; '.join(other)}. Give the same options, or another folder")


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Adds a line, and sees to it that it is on the disk."""
    with path.open("a") as file:
        file.write(json.dumps(finite(record), allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> Measurement:
    """What a file holds. A last line that was cut off while it was written does not count.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is no such file.
    """
    header, runs, timings = None, [], None
    for line in complete_lines(path):
        try:
            values = dict(line)
            kind = values.pop("kind", None)
            if kind == "header":
                header = values
            elif kind == "run":
                runs.append(_run(values))
            elif kind == "timings":
                timings = _timings(values)
            else:
                raise ValueError(f"kind {kind!r}")
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: a line that is no result of skipreduce tta ({error})") from None
    if header is None:
        raise ValueError(f"{path}: no line says what was measured; it is no result of skipreduce tta")
    return Measurement(header, runs, timings)


def complete_lines(path: Path) -> list[dict[str, Any]]:
    """The JSON objects in a file, without a last one that was cut off."""
    lines = path.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not one JSON object per line ({error})") from None


def _run(values: dict[str, Any]) -> Run:
    evaluations = tuple(Evaluation(**_numbers(item)) for item in values["evaluations"])
    return Run(**values | {"evaluations": evaluations, "step_seconds": tuple(values["step_seconds"])})


def _numbers(item: Mapping[str, Any]) -> dict[str, Any]:
    return {key: math.nan if value is None else value for key, value in item.items()}


def _timings(values: dict[str, Any]) -> Timings:
    by_method = {name: {m: tuple(s) for m, s in values[name].items()} for name in ("step", "local")}
    return Timings(tuple(values["compute"]), by_method["step"], by_method["local"])
