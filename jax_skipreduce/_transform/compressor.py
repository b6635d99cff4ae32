"""Compressor: what is sent of a bucket of gradients, and what a worker keeps for later. One file each.

A compressor knows how to reduce one bucket. `transformation` provides everything else: the choice of leaves (`protect`,
`min_size`), buckets, pjit programs, state per worker, checkpoints, the comparison of configurations, `describe`,
`metrics`.
"""

from __future__ import annotations

import abc
import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np

from jax_skipreduce._gradients.ratio import schedule_text
from jax_skipreduce._workers.group import Group


@dataclasses.dataclass(frozen=True)
class LeafPlan:
    """What a compressor does with one leaf in one step.

    Attributes:
      bucket_key: leaves of one key may share a bucket; hashable, known when the step is traced.
      value: whatever the compressor needs to know about the leaf. It may be traced, and is the same for all leaves of a
        key.
    """

    bucket_key: Any = None
    value: Any = None


@dataclasses.dataclass(frozen=True)
class LeafForecast:
    """What a worker sends of one compressed leaf in one step.

    Attributes:
      sent_as: the name of the format that travels, such as a dtype.
      wire_bytes: bytes that a worker sends.
      num_left_out: elements that a worker leaves out, averaged over the workers.
      num_skipped: reduce-scatter steps left out.
    """

    sent_as: str
    wire_bytes: int
    num_left_out: float = 0.0
    num_skipped: int = 0


@dataclasses.dataclass(frozen=True)
class StepForecast:
    """What a compressor does with a tree in one step.

    Attributes:
      leaves: one forecast per leaf, as if all leaves were compressed.
      skip_ratio: the share of the reduction that the user asked to leave out; None if leaves have ratios of their own.
      num_skipped: reduce-scatter steps left out; the most of any leaf.
      has_schedule: whether the forecast may differ in another step.
    """

    leaves: tuple[LeafForecast, ...]
    skip_ratio: float | None = None
    num_skipped: int = 0
    has_schedule: bool = False


class Compressor(abc.ABC):
    """Reduces buckets of float or complex gradients over the workers of a group.

    Subclasses are frozen dataclasses. Their fields are compared between processes.

    Attributes:
      name: the name in messages and tables.
      treatment: the word of `describe` for a compressed leaf.
    """

    name: ClassVar[str]
    treatment: ClassVar[str] = "compressed"

    @property
    def keeps_state(self) -> bool:
        """Whether workers keep anything from step to step; override it where a field decides."""
        return type(self).init is not Compressor.init

    def init(self, leaf: jax.ShapeDtypeStruct, num_workers: int) -> Any:
        """What one worker keeps of one leaf: a pytree of arrays, the same on all workers at first. None: nothing.

        Args:
          leaf: shape and dtype of the part that one worker holds (of a shard, if the parameter is sharded).
          num_workers: N.
        """
        del leaf, num_workers

    def resize(self, states: Any, num_workers: int) -> Any:
        """States of one leaf for another number of workers: leaves of shape (N, ..) -> (`num_workers`, ..).

        Raises:
          ValueError: the compressor has no rule.
        """
        del states
        raise ValueError(
            f"{self.name} has no rule for its state at another number of workers ({num_workers}): start it anew with "
            "tx.init"
        )

    def plan_leaves(self, tree: Any, num_workers: int, count: Any) -> list[LeafPlan]:
        """The plan for each leaf of `tree` in step `count`, in order. `count` may be traced."""
        del num_workers, count
        return [LeafPlan()] * len(jax.tree.leaves(tree))

    def plan_buckets(self, values: Sequence[Any], group: Group, count: Any) -> list[Any]:
        """What `reduce` needs to know about each bucket, from the values of its leaves. Shifts are drawn here."""
        del group, count
        return list(values)

    @abc.abstractmethod
    def reduce(
        self, bucket: Sequence[jax.Array], states: Sequence[Any], plan: Any, group: Group
    ) -> tuple[Sequence[jax.Array], Sequence[Any]]:
        """The means of a bucket over the workers, and what each worker keeps of it.

        Args:
          bucket: what this worker contributes: arrays of one dtype, none of them empty.
          states: what this worker keeps of each array, as `init` made it.
          plan: the bucket's entry of `plan_buckets`.
          group: the workers.

        Returns:
          Means in the shapes and dtype of `bucket`, typed as the same on all workers; states in the structure, shapes
          and dtypes of `states`.
        """

    @abc.abstractmethod
    def forecast(self, tree: Any, num_workers: int, num_parts: int, count: int) -> StepForecast:
        """What `reduce` will send, without running anything.

        Args:
          tree: shapes of what one worker holds.
          num_workers: N.
          num_parts: M, workers on the fast axes. Each of them has 1/M of a leaf to send.
          count: the step.
        """

    def headline(self, forecast: StepForecast, num_workers: int, when: str) -> str:
        """The summary of a step in a few words. `when` names the step if there is a schedule, and is else empty."""
        del forecast, num_workers
        return self.name + when

    def fingerprint(self, tree: Any) -> tuple[dict[str, str], list[str]]:
        """What all processes have to agree on: settings by name, and a text for each leaf of `tree`."""
        fields = {field.name: _field_text(getattr(self, field.name)) for field in dataclasses.fields(self)}  # pyright: ignore[reportArgumentType]
        return {"compressor": self.name} | fields, [""] * len(jax.tree.leaves(tree))


def _field_text(value: Any) -> str:
    """A text that is the same on processes that agree: what a schedule gives, all digits of an array."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(np.asarray(value).tobytes()).hexdigest()[:16]}"
    if not callable(value):
        return str(value)
    try:
        return schedule_text(value)
    except (TypeError, ValueError):
        return getattr(value, "__qualname__", type(value).__name__)  # a function of something else
