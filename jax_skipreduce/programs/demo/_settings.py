"""What can be asked of the demo: the choices of its options, and one frozen record of them all."""

from __future__ import annotations

import dataclasses
import enum

from jax_skipreduce.programs.common.data import DataName, Partition


class Mode(enum.StrEnum):
    """`mode` of `skipreduce`."""

    RANDOM = "random"
    STATIC = "static"
    DROPOUT = "dropout"


class Normalize(enum.StrEnum):
    """`normalize` of `skipreduce`."""

    SKIP = "skip"
    DROP = "drop"


class Optimizer(enum.StrEnum):
    """What follows the reduction in the chain."""

    ADAM = "adam"
    SGD = "sgd"


# Of the optimizers above, where --learning-rate is not given.
DEFAULT_LEARNING_RATES = {Optimizer.ADAM: 2e-3, Optimizer.SGD: 5e-2}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a comparison. Both trainings share all that does not belong to skipping.

    Attributes:
      skip_ratio, mode, normalize: arguments of `skipreduce`.
      num_workers: N, as many as there are devices for.
      num_steps: training steps of each run.
      batch_size: images per worker and step.
      seeds: one run of both methods for each. A seed decides on the shards, the initial parameters,
        the order of the images and the shifts.
    """

    skip_ratio: float
    mode: Mode
    normalize: Normalize
    num_workers: int
    num_steps: int
    batch_size: int
    optimizer: Optimizer
    learning_rate: float
    partition: Partition
    data: DataName
    seeds: tuple[int, ...]
