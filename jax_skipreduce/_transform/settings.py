"""The settings that every transformation has, whatever its compressor."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

from jax_skipreduce._gradients.selection import Protect
from jax_skipreduce._transform.compressor import Compressor
from jax_skipreduce._workers.axes import AxisName, axis_names
from jax_skipreduce._workers.ranges import check_int


@dataclasses.dataclass(frozen=True)
class Settings:
    """Which gradients are reduced how, over which axes, in what program. The names are the arguments of `skipreduce`.

    Attributes:
      axis_name: the data axis, or a tuple of axes.
      compressor: what is sent of a bucket.
      protect: leaves that are reduced in full.
      min_size: leaves with fewer elements are reduced in full.
      bucket_bytes: size up to which leaves share a bucket.
      fast_axes: axes over which gradients are reduced in full before, and gathered after. A tuple after construction.
      mesh: the mesh of a pjit program.
      param_specs: how parameters are sharded over other axes.
    """

    axis_name: AxisName
    compressor: Compressor
    protect: Protect = None
    min_size: int = 1024
    bucket_bytes: int = 25 * 2**20
    fast_axes: Any = ()
    mesh: Any = None
    param_specs: Any = None

    def __post_init__(self) -> None:
        slow, fast_as_given = axis_names(self.axis_name), self.fast_axes
        fast = axis_names(self.fast_axes) if self.fast_axes != () else ()
        object.__setattr__(self, "fast_axes", fast)
        if both := sorted(map(str, set(slow) & set(fast))):
            raise ValueError(
                f"fast_axes={fast}: {', '.join(both)} is in axis_name={self.axis_name!r}, too. An axis is either "
                "reduced in full (fast_axes) or with skipping (axis_name)"
            )
        if fast and self.compressor.keeps_state:
            raise ValueError(
                f"fast_axes={fast_as_given!r}: {self.compressor.name} keeps state per worker, which does not go with "
                "two networks. Leave fast_axes out, and name all data axes in axis_name"
            )
        check_int("min_size", self.min_size, 0)
        check_int("bucket_bytes", self.bucket_bytes, 1)
        if self.mesh is not None and (missing := [name for name in self.all_axes if name not in self.mesh.axis_names]):
            given = f"axis_name={self.axis_name!r}" + (f", fast_axes={fast_as_given!r}" if fast else "")
            raise ValueError(f"{given}: the mesh has no axis {missing}, only {self.mesh.axis_names}")

    @property
    def all_axes(self) -> tuple[Any, ...]:
        """The axes that data is parallel over: first the axes of the compressor, then the fast axes."""
        return (*axis_names(self.axis_name), *self.fast_axes)

    @property
    def other_axes(self) -> list[Any]:
        """The axes of `mesh` that parameters may be sharded over."""
        return [name for name in self.mesh.axis_names if name not in self.all_axes]

    def num_workers_on_mesh(self) -> int:
        """N, on `mesh`."""
        return prod(self.mesh.shape[name] for name in axis_names(self.axis_name))
