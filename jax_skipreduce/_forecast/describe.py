"""describe(): what is skipped, what is protected, and what goes over the wire; before a run."""

from __future__ import annotations

import dataclasses
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_skipreduce._backends.ppermute import slice_size
from jax_skipreduce._gradients.buckets import group_of, make_buckets
from jax_skipreduce._gradients.ratio import is_of_each, num_steps_of, ratio_at, ratios_of_leaves
from jax_skipreduce._gradients.selection import Treatment, indices_of, leaf_paths, protected_leaves, treatments
from jax_skipreduce._topologies import ring as _ring
from jax_skipreduce._transform.sharded import axes_of, broadcast_specs, specs_of_types
from jax_skipreduce._transform.skipreduce import SkipReduce
from jax_skipreduce._transform.step import Config, steps_of_leaves
from jax_skipreduce._workers.axes import axis_names
from jax_skipreduce._workers.wire import sent_dtype


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """One gradient.

    Attributes:
      path: its keys, joined with ``/``.
      shape: of the part that a worker holds (smaller than the parameter if that is sharded).
      dtype: name of the dtype.
      wire_dtype: name of the dtype that it is sent in.
      treatment: ``"skipped"``, or why it is reduced in full: ``"protected"``, ``"small"``,
        ``"integer"``; ``"empty"`` if there is nothing to reduce.
      num_elements: elements of it.
      num_skipped_elements: elements that a worker leaves out per step, averaged over the workers.
      wire_bytes: bytes that a worker sends for it per step.
      full_wire_bytes: the same in a plain ring all-reduce.
      num_skipped: k, reduce-scatter steps left out of the ring that it goes around; 0 if it is reduced in full.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    wire_dtype: str
    treatment: Treatment
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
      skip_ratio: the ratio that was asked for, in this step; None where leaves have ratios of their own.
      count: the step, where there is a schedule; else None.
      num_skipped: k = round(skip_ratio * N), reduce-scatter steps left out; the most of any leaf.
      num_buckets: ring collectives per step (those in full are one more call).
      protects_nothing: `protect` was given, and names no leaf. A mistyped path?
      leaves: one `LeafDescription` per leaf.
      num_fast_workers: M, on the fast axes; 1 without. Then bytes are those on the slow axes, where
        each worker sends 1/M of the gradient.
    """

    num_workers: int
    skip_ratio: float | None
    count: int | None
    num_skipped: int
    num_buckets: int
    protects_nothing: bool
    leaves: tuple[LeafDescription, ...]
    num_fast_workers: int = 1

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
        """How many times less is sent: what the collective gains where bytes take the time."""
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
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 5 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], *self._summary()])

    def _summary(self) -> list[str]:
        """What the table comes to, in sentences."""
        share = self.num_skipped_elements / self.num_elements if self.num_elements else 0.0
        at_step = "" if self.count is None else f" (at step {self.count} of the schedule)"
        ratio = "by leaf" if self.skip_ratio is None else f"{self.skip_ratio:g}"
        least = min((leaf.num_skipped for leaf in self.leaves if leaf.treatment == "skipped"), default=self.num_skipped)
        steps = f"{least} to {self.num_skipped}" if least != self.num_skipped else f"{self.num_skipped}"
        lines = [
            f"{self.num_workers} workers, skip_ratio {ratio}{at_step}: {steps} of "
            f"{self.num_workers - 1} reduce-scatter steps skipped, in {self.num_buckets} bucket(s).",
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


def describe(
    params: Any,
    num_workers: int,
    tx: optax.GradientTransformation | None = None,
    *,
    count: int = 0,
    num_fast_workers: int | None = None,
    **settings: Any,
) -> Description:
    """What `skipreduce` would do with the gradients of `params`. Runs nothing, sends nothing.

    Args:
      params: the parameters, or their shapes (`jax.eval_shape`).
      num_workers: N, workers on the data axis (on the slow ones, with `fast_axes`).
      tx: the transformation that `skipreduce` returned (not the chain that it is part of). With
        `mesh` or `param_specs` in it, numbers are those of one shard; without `mesh`, call it in a
        context of `jax.set_mesh`.
      count: the step to look at, where the skip ratio is a schedule.
      num_fast_workers: M, workers on the fast axes, with `fast_axes`. None: as the mesh of `tx` says.
      **settings: in place of `tx`, arguments of `skipreduce`: `skip_ratio`, `mode`, `protect`,
        `min_size`, `bucket_bytes`, ..; all but `mesh` and `param_specs`, which take a `tx`.

    Returns:
      A `Description`: plain numbers, and a table when printed.

    Raises:
      ValueError: `num_workers` is below 1 or not that of the mesh, or a setting is out of range.
      TypeError: `num_workers` is no int, both `tx` and settings are given, or `tx` is not from `skipreduce`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> params = {"dense": {"kernel": jnp.zeros((784, 128)), "bias": jnp.zeros(128)}}
      >>> description = sr.describe(params, num_workers=8, skip_ratio=0.5)
      >>> description.wire_bytes, description.full_wire_bytes, round(description.theoretical_speedup, 3)
      (502656, 703360, 1.399)
    """
    if isinstance(num_workers, bool) or not isinstance(num_workers, (int, np.integer)):
        raise TypeError(f"num_workers={num_workers!r}: expected an int, as in sr.describe(params, 8, tx)")
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: expected at least 1")
    mesh = param_specs = None
    if tx is None:
        unknown = sorted(set(settings) - {field.name for field in dataclasses.fields(Config)})
        if unknown:
            raise TypeError(
                f"{', '.join(unknown)}: not a setting that describe takes, such as skip_ratio=0.5. For mesh and "
                "param_specs, give it the transformation: sr.describe(params, n, sr.skipreduce(..))"
            )
        config = Config(**{"axis_name": "data", **settings})
    elif settings:
        raise TypeError(f"tx and {', '.join(settings)}: give the transformation or its settings, not both")
    elif isinstance(tx, SkipReduce) and hasattr(tx, "config"):
        config, mesh, param_specs = tx.config, tx.mesh, tx.param_specs
    else:
        raise TypeError(
            f"tx is a {type(tx).__name__}: expected what sr.skipreduce returned (or settings by keyword, such as "
            "skip_ratio=0.5). A chain does not know its parts: reduction = sr.skipreduce(..), "
            "tx = optax.chain(reduction, ..), sr.describe(params, n, reduction)"
        )
    num_parts = _num_fast_workers(config, mesh, num_fast_workers)
    leaves, varying = _shards(params, mesh, param_specs, config, num_workers)
    paths = leaf_paths(params)
    shards = jax.tree.unflatten(jax.tree.structure(params), leaves)
    is_protected = protected_leaves(shards, config.protect)
    treated = treatments(shards, is_protected, config.min_size)
    by_leaf = is_of_each(config.skip_ratio)
    of_leaves, keys = steps_of_leaves(config, shards, num_workers, jnp.int32(count))
    steps = [int(k) for k in of_leaves]
    groups = {i: (group_of(leaves[i], varying[i]), keys[i]) for i in indices_of(treated, "skipped")}
    described = tuple(
        _describe_leaf(path, leaf, treatment, num_workers, num_parts, k, config)
        for path, leaf, treatment, k in zip(paths, leaves, treated, steps, strict=True)
    )
    has_schedule = any(map(callable, ratios_of_leaves(config.skip_ratio, shards) if by_leaf else [config.skip_ratio]))
    # Without leaves, a ratio for all is still one.
    of_all = None if by_leaf else ratio_at(config.skip_ratio, jnp.int32(count))
    most = max((leaf.num_skipped for leaf in described if leaf.treatment == "skipped"), default=0)
    return Description(
        num_workers=num_workers,
        skip_ratio=None if of_all is None else float(of_all),
        count=count if has_schedule else None,
        num_skipped=most if of_all is None else int(num_steps_of(of_all, num_workers)),
        num_buckets=len(make_buckets(leaves, groups, config.bucket_bytes)),
        protects_nothing=config.protect is not None and not any(is_protected),
        leaves=described,
        num_fast_workers=num_parts,
    )


def _num_fast_workers(config: Config, mesh: Any, given: int | None) -> int:
    """M: as given, or as the mesh says; both have to agree."""
    if not config.fast_axes:
        if given not in (None, 1):
            raise ValueError(f"num_fast_workers={given}: there are no fast_axes in what is described")
        return 1
    if mesh is not None:
        on_mesh = prod(mesh.shape[name] for name in config.fast_axes)
        axes = config.fast_axes
        if given not in (None, on_mesh):
            raise ValueError(f"num_fast_workers={given}: the mesh of tx has {on_mesh} workers along {axes!r}")
        return on_mesh
    if given is None or given < 1:
        raise ValueError(
            f"fast_axes={config.fast_axes!r}: how many workers there are on them has to be said, such as "
            "num_fast_workers=4"
        )
    return given


def _describe_leaf(
    path: str,
    leaf: Any,
    treatment: Treatment,
    num_workers: int,
    num_parts: int,
    steps_skipped: int,
    config: Config,
) -> LeafDescription:
    own = jnp.dtype(jnp.int32) if leaf.dtype == bool else leaf.dtype  # psum adds flags up as int32
    slice_elements = slice_size(slice_size(leaf.size, num_parts), num_workers)
    full = _ring.num_wire_steps(num_workers) * slice_elements * own.itemsize
    sent, wire, skipped, k = own, full, 0.0, 0
    if treatment == "skipped":
        sent = sent_dtype(own, config.wire_dtype)
        skipped, k = leaf.size * steps_skipped / num_workers, 0 if config.is_dropout else steps_skipped
        if config.is_dropout:
            skipped *= (num_workers - 1) / num_workers  # the first worker of a chain always contributes
        steps = _ring.num_wire_steps(num_workers, 0 if config.is_dropout else steps_skipped)
        wire = steps * slice_elements * sent.itemsize
    return LeafDescription(path, leaf.shape, str(leaf.dtype), str(sent), treatment, leaf.size, skipped, wire, full, k)


def _shards(
    params: Any, mesh: Any, param_specs: Any, config: Config, num_workers: int
) -> tuple[list[jax.ShapeDtypeStruct], list[frozenset[Any]]]:
    """What one device holds of each parameter, and the axes that the shard varies over."""
    flat = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(params)]
    if mesh is not None:
        on_mesh = prod(mesh.shape[name] for name in axis_names(config.axis_name))
        if on_mesh != num_workers:
            raise ValueError(
                f"num_workers={num_workers}: the mesh of tx has {on_mesh} workers along {config.axis_name!r}"
            )
    elif param_specs is not None:
        mesh = jax.sharding.get_abstract_mesh()
        if mesh.empty:
            raise ValueError(
                "tx has param_specs, but no mesh, so the sizes of shards are not known here: call describe in a "
                "context of jax.set_mesh(mesh)"
            )
    if mesh is None:
        return flat, [frozenset()] * len(flat)
    specs = specs_of_types(params) if param_specs is None else broadcast_specs(param_specs, params)
    specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    shards = [
        jax.ShapeDtypeStruct(jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape), leaf.dtype)
        for leaf, spec in zip(flat, specs, strict=True)
    ]
    return shards, [axes_of(spec) for spec in specs]
