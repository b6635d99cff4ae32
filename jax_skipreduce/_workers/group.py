"""The workers along a named axis: who they are, and what JAX knows about who holds the same value."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
from jax import lax

from jax_skipreduce._workers import axes
from jax_skipreduce._workers.axes import AxisName


@dataclasses.dataclass(frozen=True)
class Group:
    """The workers of a reduction. Made where it is used, inside the trace.

    Attributes:
      names: axes, in the order of the mesh.
      size: number of workers N.
      rank: number of this worker among them, an int32 that varies over the axes.
      tracked: whether JAX tracks which values vary over the axes.
    """

    names: tuple[Hashable, ...]
    size: int
    rank: jax.Array
    tracked: bool

    @classmethod
    def of(cls, axis_name: AxisName, rank: jax.Array | None = None) -> Group:
        """The workers along `axis_name`, which is checked.

        Args:
          axis_name: a mesh axis or a tuple of them, bound here.
          rank: the rank of this worker, if it came in as an operand: in the body of an inner function, which outlives
            the trace around it, or in a nested shard_map, where JAX 0.10.0 cannot lower the index of an outer axis.

        Raises:
          ValueError: an axis is not bound.
        """
        names = axes.bound_axes(axis_name)
        own = lax.axis_index(names) if rank is None else rank
        return cls(names, lax.axis_size(names), own, axes.is_tracked(own, names))

    def local(self, x: jax.Array) -> jax.Array:
        """`x`, typed as differing between workers."""
        return axes.make_varying(x, self.names) if self.tracked else x

    def shared_over(self, x: Any) -> list[Hashable]:
        """Axes over which JAX knows `x` to be the same. Empty if JAX does not track that."""
        return [name for name in self.names if name not in axes.varying_axes(x)] if self.tracked else []

    def permute(self, x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """The `x` of the worker whose pair (source, target) has this worker as target; zeros without such a pair."""
        return lax.ppermute(x, self.names, pairs)

    def gather(self, x: jax.Array) -> jax.Array:
        """The `x` of all workers on a new leading axis, by rank. JAX knows the result to be the same on all workers."""
        return lax.all_gather(x, self.names, to="invarying" if self.tracked else "varying")

    @property
    def is_simulated(self) -> bool:
        """Whether `jax.vmap` (or `jax.pmap`) makes the workers, so that their axis is no mesh axis."""
        manual = jax.sharding.get_abstract_mesh().manual_axes
        return any(name not in manual for name in self.names)
