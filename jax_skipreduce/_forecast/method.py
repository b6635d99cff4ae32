"""Method: the settings of a transformation as an object, which keeps them when the transformation is in a chain."""

from __future__ import annotations

import abc
from typing import Any, ClassVar

import optax

from jax_skipreduce._forecast.describe import Description, forecast
from jax_skipreduce._forecast.metrics import metrics
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._transform.state import resize_state
from jax_skipreduce._transform.transformation import transformation


class Method(abc.ABC):
    """Settings, and what can be done with them. Subclasses are frozen dataclasses of their public arguments.

    Attributes:
      name: the name under which `describe`, bench and tta find the method.
    """

    name: ClassVar[str]

    @property
    @abc.abstractmethod
    def settings(self) -> Settings:
        """The settings, checked."""

    def transform(self) -> optax.GradientTransformation:
        """The optax transformation: put it first in the chain."""
        return transformation(self.settings)

    def describe(
        self, params: Any, num_workers: int | None = None, *, count: int = 0, num_fast_workers: int | None = None
    ) -> Description:
        """What the transformation would do with the gradients of `params`; see `describe`."""
        return forecast(self.settings, params, num_workers, count, num_fast_workers)

    def metrics(
        self, opt_state: Any, params: Any, num_workers: int | None = None, *, num_fast_workers: int | None = None
    ) -> dict[str, float]:
        """What the transformation does in the step that comes next; see `metrics`."""
        return metrics(opt_state, params, num_workers, self, num_fast_workers=num_fast_workers)

    def resize_state(self, opt_state: Any, params: Any, num_workers: int) -> Any:
        """`opt_state` of a checkpoint, changed for another number of workers than it was written with.

        The step counter is the same at any number. What each old worker kept (`SkipReduceState.per_worker`) is handed
        to the `num_workers` new workers, as the compressor of the method documents.

        Raises:
          ValueError: the compressor has no rule, or the state belongs to other parameters.
        """
        return resize_state(self.settings, opt_state, params, num_workers)
