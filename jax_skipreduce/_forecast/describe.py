"""describe(): what is skipped, what is protected, and what goes over the wire, before a run."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.table import text_table
from jax_skipreduce._topologies.ring import RING
from jax_skipreduce._transform.compressor import LeafForecast, StepForecast
from jax_skipreduce._transform.plan import plan_step
from jax_skipreduce._transform.registry import METHODS
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._transform.shards import shards_of
from jax_skipreduce._workers.blocks import slice_size
from jax_skipreduce._workers.renamed import renamed


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """One gradient.

    Attributes:
      path: the keys of the gradient, joined with ``/``.
      shape: the shape of the part that a worker holds (smaller than the parameter if the parameter is sharded).
      dtype: the name of the dtype.
      wire_dtype: the name of the dtype on the wire.
      treatment: ``"skipped"``, or the word of another compressor. ``"protected"``, ``"small"`` and ``"integer"`` are
        reasons for a reduction in full. ``"empty"`` means that there is nothing to reduce.
      num_elements: the number of elements.
      num_skipped_elements: elements that a worker leaves out per step, averaged over the workers.
      wire_bytes: bytes that a worker sends for the gradient per step.
      full_wire_bytes: the same in a plain ring all-reduce.
      num_skipped: k, reduce-scatter steps left out; 0 if the gradient is reduced in full.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    wire_dtype: str
    treatment: str
    num_elements: int
    num_skipped_elements: float
    wire_bytes: int
    full_wire_bytes: int
    num_skipped: int = 0


@dataclasses.dataclass(frozen=True)
class Description:
    """What `skipreduce` does with a tree of gradients. Prints as a table.

    Attributes:
      num_workers: N.
      skip_ratio: the ratio that was asked for, in this step; None if leaves have ratios of their own.
      count: the step, if there is a schedule; else None.
      num_skipped: k = round(skip_ratio * N), reduce-scatter steps left out; the most of any leaf.
      num_buckets: collectives per step for what is skipped (the leaves that are reduced in full take one more call).
      protects_nothing: whether `protect` was given but names no leaf. A mistyped path?
      leaves: one `LeafDescription` per leaf.
      num_fast_workers: M, workers on the fast axes; 1 without fast axes. With fast axes, bytes are those on the slow
        axes, where each worker sends 1/M of the gradient.
      headline: the step in a few words.
    """

    num_workers: int
    skip_ratio: float | None
    count: int | None
    num_skipped: int
    num_buckets: int
    protects_nothing: bool
    leaves: tuple[LeafDescription, ...]
    num_fast_workers: int = 1
    headline: str = ""

    @property
    def num_elements(self) -> int:
        """Elements of the gradient."""
        return sum(leaf.num_elements for leaf in self.leaves)

    @property
    def num_skipped_elements(self) -> float:
        """Elements that a worker leaves out per step, averaged over the workers."""
        return sum(leaf.num_skipped_elements for leaf in self.leaves)

    @property
    def wire_bytes(self) -> int:
        """Bytes that a worker sends per step."""
        return sum(leaf.wire_bytes for leaf in self.leaves)

    @property
    def full_wire_bytes(self) -> int:
        """Bytes that a worker sends per step in a plain ring all-reduce."""
        return sum(leaf.full_wire_bytes for leaf in self.leaves)

    @property
    def theoretical_speedup(self) -> float:
        """How many times fewer bytes are sent. The collective gets that much faster where bytes take the time."""
        return self.full_wire_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def __str__(self) -> str:
        header = ("gradient", "shape", "dtype", "sent as", "treatment", "elements", "skipped", "bytes sent", "in full")
        rows = [
            (
                *(leaf.path, str(leaf.shape), leaf.dtype, leaf.wire_dtype, leaf.treatment, f"{leaf.num_elements:,}"),
                *(f"{leaf.num_skipped_elements:,.0f}", f"{leaf.wire_bytes:,}", f"{leaf.full_wire_bytes:,}"),
            )
            for leaf in self.leaves
        ]
        rows.append(
            (
                *("total", "", "", "", "", f"{self.num_elements:,}"),
                *(f"{self.num_skipped_elements:,.0f}", f"{self.wire_bytes:,}", f"{self.full_wire_bytes:,}"),
            )
        )
        return "\n".join([text_table(header, rows, num_left=5), *self._summary()])

    def _summary(self) -> list[str]:
        """The totals of the table, in sentences."""
        share = self.num_skipped_elements / self.num_elements if self.num_elements else 0.0
        lines = [
            f"{self.num_workers} workers, {self.headline}, in {self.num_buckets} bucket(s).",
            f"Per worker and step {share:.1%} of the gradient are left out; theoretical speed-up of the all-reduce "
            f"{self.theoretical_speedup:.2f}x.",
        ]
        if self.num_fast_workers > 1:
            lines.append(
                f"Bytes are those on the slow axis: each of {self.num_fast_workers} fast workers sends its part of the "
                "gradient there."
            )
        if self.skip_ratio and self.num_skipped == 0:
            lines.append(
                f"The ratio rounds to no step, so nothing is skipped: with {self.num_workers} workers one step is a "
                f"ratio of {1 / self.num_workers:.3g}."
            )
        if self.protects_nothing:
            lines.append("protect names no leaf: nothing is protected.")
        return lines


@renamed(tx="give the settings, sr.SkipReduce(..): a transformation does not know them")
def describe(
    params: Any,
    num_workers: int | None = None,
    method: Any = None,
    *,
    count: int = 0,
    num_fast_workers: int | None = None,
    **settings: Any,
) -> Description:
    """What `skipreduce` would do with the gradients of `params`. Nothing is run or sent.

    Args:
      params: the parameters, or their shapes (`jax.eval_shape`).
      num_workers: N, workers on the data axis (with `fast_axes`, on the slow axes). None: N of the mesh in `method`.
      method: the settings, such as ``sr.SkipReduce("data", 0.5)``. If the settings have `mesh` or `param_specs`,
        numbers are those of one shard. With `param_specs` and no `mesh`, call it in a context of `jax.set_mesh`.
      count: the step to describe, if the skip ratio is a schedule.
      num_fast_workers: M, workers on the fast axes, with `fast_axes`. None: M of the mesh.
      **settings: in place of `method`, arguments of `skipreduce`: `skip_ratio`, `mode`, `protect`,
        `min_size`, `bucket_bytes`, ..

    Returns:
      A `Description`: plain numbers, and a table when printed.

    Raises:
      ValueError: `num_workers` is below 1 or not that of the mesh, or a setting is out of range.
      TypeError: `num_workers` is no int, both `method` and settings are given, or `method` holds no settings.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> params = {"dense": {"kernel": jnp.zeros((784, 128)), "bias": jnp.zeros(128)}}
      >>> description = sr.describe(params, num_workers=8, skip_ratio=0.5)
      >>> description.wire_bytes, description.full_wire_bytes, round(description.theoretical_speedup, 3)
      (502656, 703360, 1.399)
    """
    if method is None:
        axis_name = settings.pop("axis_name", "data")
        try:
            method = METHODS["skipreduce"](axis_name, **settings)
        except TypeError as error:
            if "unexpected keyword" not in str(error):
                raise
            raise TypeError(f"{error}: expected arguments of skipreduce, such as skip_ratio=0.5") from None
    elif settings:
        raise TypeError(f"method and {', '.join(settings)}: give the method or its settings, not both")
    return forecast(settings_of(method), params, num_workers, count, num_fast_workers)


def settings_of(method: Any) -> Settings:
    """The settings that `method` holds.

    Raises:
      TypeError: `method` holds no settings.
    """
    if not isinstance(getattr(method, "settings", None), Settings):
        raise TypeError(
            f"method is a {type(method).__name__}: expected settings, such as sr.SkipReduce('data', 0.5). A "
            "transformation does not know them, alone or in a chain: method = sr.SkipReduce(..), "
            "tx = optax.chain(method.transform(), ..), method.describe(params, num_workers)"
        )
    return method.settings


def forecast(
    settings: Settings, params: Any, num_workers: int | None, count: int, num_fast_workers: int | None
) -> Description:
    """What a transformation with these settings would do; see `describe`."""
    num_workers = _num_workers(settings, num_workers)
    num_parts = _num_fast_workers(settings, num_fast_workers)
    shards = shards_of(settings, params, None, num_workers)
    tree = jax.tree.unflatten(jax.tree.structure(params), [shard.leaf for shard in shards])
    plan = plan_step(settings, tree, [frozenset(shard.axes) for shard in shards], num_workers, jnp.int32(count))
    step = settings.compressor.forecast(tree, num_workers, num_parts, count)
    described = tuple(
        _describe_leaf(settings, path, shard.leaf, treatment, num_workers, num_parts, compressed)
        for path, shard, treatment, compressed in zip(
            leaf_paths(params), shards, plan.treatments, step.leaves, strict=True
        )
    )
    step = _of_compressed(step, [treatment == "compressed" for treatment in plan.treatments])
    return Description(
        num_workers=num_workers,
        skip_ratio=step.skip_ratio,
        count=count if step.has_schedule else None,
        num_skipped=step.num_skipped,
        num_buckets=len(plan.buckets),
        protects_nothing=plan.protects_nothing,
        leaves=described,
        num_fast_workers=num_parts,
        headline=settings.compressor.headline(
            step, num_workers, f" (at step {count} of the schedule)" if step.has_schedule else ""
        ),
    )


def _of_compressed(step: StepForecast, is_compressed: list[bool]) -> StepForecast:
    """The forecast for the compressed leaves alone."""
    leaves = tuple(leaf for leaf, is_one in zip(step.leaves, is_compressed, strict=True) if is_one)
    most = max((leaf.num_skipped for leaf in leaves), default=0)
    return dataclasses.replace(step, leaves=leaves, num_skipped=most if step.skip_ratio is None else step.num_skipped)


def _num_workers(settings: Settings, given: int | None) -> int:
    """N as given, or of the mesh. If both are known, they have to agree."""
    if given is not None and (isinstance(given, bool) or not isinstance(given, (int, np.integer))):
        raise TypeError(f"num_workers={given!r}: expected an int, as in sr.describe(params, 8, method)")
    if given is not None and given < 1:
        raise ValueError(f"num_workers={given}: expected at least 1")
    if settings.mesh is None:
        if given is None:
            raise ValueError("num_workers=None: without a mesh in the settings, say how many workers there are")
        return int(given)
    on_mesh = settings.num_workers_on_mesh()
    if given not in (None, on_mesh):
        raise ValueError(f"num_workers={given}: the mesh has {on_mesh} workers along {settings.axis_name!r}")
    return on_mesh


def _num_fast_workers(settings: Settings, given: int | None) -> int:
    """M as given, or of the mesh. If both are known, they have to agree."""
    if not settings.fast_axes:
        if given not in (None, 1):
            raise ValueError(f"num_fast_workers={given}: there are no fast_axes in what is described")
        return 1
    if settings.mesh is not None:
        on_mesh = prod(settings.mesh.shape[name] for name in settings.fast_axes)
        if given not in (None, on_mesh):
            raise ValueError(f"num_fast_workers={given}: the mesh has {on_mesh} workers along {settings.fast_axes!r}")
        return on_mesh
    if given is None or given < 1:
        raise ValueError(
            f"fast_axes={settings.fast_axes!r}: how many workers there are on them has to be said, such as "
            "num_fast_workers=4"
        )
    return given


def _describe_leaf(
    settings: Settings,
    path: str,
    leaf: Any,
    treatment: str,
    num_workers: int,
    num_parts: int,
    compressed: LeafForecast,
) -> LeafDescription:
    own = jnp.dtype(jnp.int32) if leaf.dtype == bool else leaf.dtype  # psum adds up bools as int32
    elements = slice_size(slice_size(leaf.size, num_parts), num_workers)
    full = RING.slices_sent(num_workers) * elements * own.itemsize
    if treatment == "compressed":
        treatment, sent = settings.compressor.treatment, compressed
    else:
        sent = LeafForecast(str(own), full)
    return LeafDescription(
        *(path, leaf.shape, str(leaf.dtype), sent.sent_as, treatment, leaf.size, sent.num_left_out),
        *(sent.wire_bytes, full, sent.num_skipped),
    )
