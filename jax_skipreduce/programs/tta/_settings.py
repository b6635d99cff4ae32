"""What can be asked of a measurement: choices, defaults, and one frozen record that travels to the workers."""

from __future__ import annotations

import dataclasses
import enum
import json
from pathlib import Path
from typing import Any


class WorkloadName(enum.StrEnum):
    """A network with its data."""

    VGG = "vgg"
    LM = "lm"


class Size(enum.StrEnum):
    """Size of the network: `SMALL` is for tests."""

    FULL = "full"
    SMALL = "small"


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Defaults of a workload. The target and the learning rate were chosen with `psum` alone, on seeds from 1000 on.

    Attributes:
      target: accuracy to reach, which `psum` does after about two thirds of the steps.
      batch_size: examples per worker and step: images, or windows of text.
      learning_rate: the largest of the schedule.
      num_test: examples that are evaluated.
      rate: of the links: one at which communication takes most of a step on a machine of two cores.
    """

    target: float
    batch_size: int
    learning_rate: float
    num_test: int
    rate: str


DEFAULTS = {
    WorkloadName.VGG: Defaults(target=0.81, batch_size=8, learning_rate=2e-3, num_test=2000, rate="300mbit"),
    WorkloadName.LM: Defaults(target=0.375, batch_size=2, learning_rate=2e-3, num_test=128, rate="150mbit"),
}

# The quick measurement wants a target that a small network reaches within a few steps.
QUICK_TARGETS = {WorkloadName.VGG: 0.4, WorkloadName.LM: 0.17}

# Step counters of different seeds start so far apart, see `_methods.start_count`.
MAX_STEPS = 2**20 - 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of the runs of one workload over links of one rate. Only types that JSON has.

    Attributes:
      workload: name of the workload.
      num_workers: N.
      rate: of the links, as `skipreduce lab` takes it; None without a lab.
      methods: names in the registry.
      seeds: one run of each method for each.
      num_steps: training steps of a run.
      evaluation_interval: steps between two evaluations.
      target: accuracy in (0, 1) to reach.
      batch_size: examples per worker and step.
      learning_rate: the largest of the schedule, the same for all methods.
      num_test: examples that are evaluated.
      size: of the network.
      num_rounds: how often each step is timed for the break-down.
      data: name of a set of images.
      data_dir: folder of the images; None: where Debian's package puts them.
      text: file to learn instead of the novels; None: the novels.
      text_dir: folder with the novels; None: where Debian's package puts them.
      lines: file that results are appended to.
      resume: whether to keep what is in that file, and to make only what is missing.
    """

    workload: str
    num_workers: int
    rate: str | None
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    num_steps: int
    evaluation_interval: int
    target: float
    batch_size: int
    learning_rate: float
    num_test: int
    size: str
    num_rounds: int
    data: str
    data_dir: str | None
    text: str | None
    text_dir: str | None
    lines: str
    resume: bool = False

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(**values | {name: tuple(values[name]) for name in ("methods", "seeds")})

    def fingerprint(self) -> dict[str, Any]:
        """What has to agree for runs to be comparable. Methods and seeds may be added to a file."""
        left_out = ("methods", "seeds", "lines", "resume", "target", "data_dir", "text_dir")
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}

    @property
    def name(self) -> str:
        """For file names and titles: ``vgg-200mbit``."""
        return f"{self.workload}-{(self.rate or 'no-lab').replace(',', '+')}"

    @property
    def path(self) -> Path:
        """Path of the file with the results."""
        return Path(self.lines)
