"""A kernel: one native way to run a reduction, on one platform. One file each."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import jax
from jax import lax

from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._workers import axes
from jax_skipreduce._workers.group import Group


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a worker stands in a reduction, as operands of the program that holds the call.

    Attributes:
      rank: int32 scalar, which worker of its group this is.
      group_number: int32 scalar, a number that the workers of a group share and no other group has.
      num_skipped: int32 scalar, k.
      shift: int32 scalar, c.
    """

    rank: jax.Array
    group_number: jax.Array
    num_skipped: jax.Array
    shift: jax.Array


class Kernel(abc.ABC):
    """Reduces arrays as `ppermute.reduce_by_ppermute` does, with the same bits.

    Attributes:
      platform: as `lax.platform_dependent` calls it.
      backend: as `jax.default_backend` calls it.
      is_automatic: whether ``backend="auto"`` takes the kernel. If not, only ``backend="native"`` does.
    """

    platform: ClassVar[str]
    backend: ClassVar[str]
    is_automatic: ClassVar[bool]

    @abc.abstractmethod
    def reason_against(self, dtype: Any, group: Group, reduction: Reduction) -> str | None:
        """The reason why the kernel cannot do this reduction on arrays of `dtype`; None if it can."""

    @abc.abstractmethod
    def run(self, arrays: Sequence[jax.Array], group: Group, reduction: Reduction, place: Place) -> list[jax.Array]:
        """The reduced arrays; see `ppermute.reduce_by_ppermute`. `typed_like` gives them their types."""


def typed_like(means: Sequence[jax.Array], operands: Sequence[Any], group: Group) -> list[jax.Array]:
    """`means`, the results of a custom call, typed as varying over the axes that are not reduced.

    JAX takes results of a custom call to be the same everywhere.
    """
    if not group.tracked:
        return list(means)
    varying = {name for value in operands for name in axes.varying_axes(value)}
    others = tuple(sorted(varying - set(group.names), key=str))
    return [axes.make_varying(mean, others) for mean in means]


def other_axes(group: Group) -> tuple[Hashable, ...]:
    """The manual mesh axes that are not reduced over, in the order of the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name in mesh.manual_axes and name not in group.names)


def group_number(group: Group) -> jax.Array | int:
    """A number that tells this group of workers from all other groups of the mesh, int32."""
    others = other_axes(group)
    return lax.axis_index(others) if others else 0
