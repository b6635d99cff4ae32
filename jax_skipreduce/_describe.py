"""describe(): what is skipped, what is protected, and what goes over the wire; before a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_skipreduce import _ring
from jax_skipreduce._buckets import make_buckets
from jax_skipreduce._execute import slice_size
from jax_skipreduce._reduction import Config
from jax_skipreduce._selection import Treatment, indices_of, leaf_path, protected_leaves, treatments
from jax_skipreduce._sharded import broadcast_specs
from jax_skipreduce._transform import SkipReduce


@dataclasses.dataclass(frozen=True)
class LeafDescription:
    """One gradient.

    Attributes:
      path: its keys, joined with ``/``.
      shape: of the part that a worker holds (smaller than the parameter if that is sharded).
      dtype: name of the dtype, in which it is sent.
      treatment: ``"skipped"``, or why it is reduced in full: ``"protected"``, ``"small"``,
        ``"integer"``; ``"empty"`` if there is nothing to reduce.
      num_elements: elements of it.
      num_skipped_elements: elements that a worker leaves out per step, averaged over the workers.
      wire_bytes: bytes that a worker sends for it per step.
      full_wire_bytes: the same in a plain ring all-reduce.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    treatment: Treatment
    num_elements: int
    num_skipped_elements: float
    wire_bytes: int
    full_wire_bytes: int


@dataclasses.dataclass(frozen=True)
class Description:
    """What `skipreduce` does with a tree of gradients. Prints as a table.

    Attributes:
      num_workers: N.
      num_skipped: k, reduce-scatter steps left out.
      num_buckets: ring collectives per step (those in full are one more call).
      protects_nothing: `protect` was given, and names no leaf. A mistyped path?
      leaves: one `LeafDescription` per leaf.
    """

    num_workers: int
    num_skipped: int
    num_buckets: int
    protects_nothing: bool
    leaves: tuple[LeafDescription, ...]

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
        header = ("gradient", "shape", "dtype", "treatment", "elements", "skipped", "bytes sent", "of")
        rows = [
            (
                *(leaf.path, str(leaf.shape), leaf.dtype, leaf.treatment, f"{leaf.num_elements:,}"),
                *(f"{leaf.num_skipped_elements:,.0f}", f"{leaf.wire_bytes:,}", f"{leaf.full_wire_bytes:,}"),
            )
            for leaf in self.leaves
        ]
        rows.append(
            (
                *("total", "", "", "", f"{self.num_elements:,}"),
                *(f"{self.num_skipped_elements:,.0f}", f"{self.wire_bytes:,}", f"{self.full_wire_bytes:,}"),
            )
        )
        widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column < 4 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in (header, *rows)
        ]
        rule = "-" * max(map(len, lines))
        share = self.num_skipped_elements / self.num_elements if self.num_elements else 0.0
        summary = (
            f"{self.num_workers} workers, {self.num_skipped} of {max(self.num_workers - 1, 0)} reduce-scatter steps "
            f"skipped, {self.num_buckets} bucket(s). Per worker and step: {share:.1%} of the gradient left out, "
            f"theoretical speed-up of the all-reduce {self.theoretical_speedup:.2f}x."
        )
        if self.protects_nothing:
            summary += "\nprotect names no leaf: nothing is protected."
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], summary])


def describe(
    params: Any,
    num_workers: int,
    tx: optax.GradientTransformation | None = None,
    *,
    count: int = 0,
    **settings: Any,
) -> Description:
    """What `skipreduce` would do with the gradients of `params`. Runs nothing, sends nothing.

    Args:
      params: the parameters, or their shapes (`jax.eval_shape`).
      num_workers: N, workers on the data axis.
      tx: the transformation that `skipreduce` returned (not the chain that it is part of). With
        `mesh` and `param_specs` in it, numbers are those of one shard.
      count: the step to look at, where the skip ratio is a schedule.
      **settings: in place of `tx`, the arguments of `skipreduce`: `skip_ratio`, `mode`, `protect`,
        `min_size`, `bucket_bytes`, ..

    Returns:
      A `Description`: plain numbers, and a table when printed.

    Raises:
      ValueError: `num_workers` is below 1, or a setting is out of range.
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
        config = Config("data", **settings)
    elif settings:
        raise TypeError(f"tx and {', '.join(settings)}: give the transformation or its settings, not both")
    elif isinstance(tx, SkipReduce):
        config, mesh, param_specs = tx.config, tx.mesh, tx.param_specs
    else:
        raise TypeError(
            f"tx={tx!r}: expected what sr.skipreduce returned. A chain does not know its parts: "
            "reduction = sr.skipreduce(..), tx = optax.chain(reduction, ..), sr.describe(params, n, reduction)"
        )
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)), params)
    if mesh is not None:
        shapes = _shards(shapes, mesh, param_specs)
    steps_skipped = int(config.num_skipped(num_workers, jnp.int32(count)))
    treated = treatments(shapes, config.protect, config.min_size)
    flat = jax.tree_util.tree_flatten_with_path(shapes)[0]
    buckets = make_buckets([leaf for _, leaf in flat], indices_of(treated, "skipped"), config.bucket_bytes)
    leaves = tuple(
        _describe_leaf(leaf_path(path), leaf, treatment, num_workers, steps_skipped, config.mode == "dropout")
        for (path, leaf), treatment in zip(flat, treated, strict=True)
    )
    protects_nothing = config.protect is not None and not any(protected_leaves(shapes, config.protect))
    return Description(num_workers, steps_skipped, len(buckets), protects_nothing, leaves)


def _describe_leaf(
    path: str, leaf: Any, treatment: Treatment, num_workers: int, steps_skipped: int, is_dropout: bool
) -> LeafDescription:
    slice_bytes = slice_size(leaf.size, num_workers) * leaf.dtype.itemsize
    full = _ring.num_wire_steps(num_workers) * slice_bytes
    wire, skipped = full, 0.0
    if treatment == "skipped":
        skipped = leaf.size * steps_skipped / num_workers
        if is_dropout:
            skipped *= (num_workers - 1) / num_workers  # the first worker of a chain always contributes
        else:
            wire = _ring.num_wire_steps(num_workers, steps_skipped) * slice_bytes
    return LeafDescription(path, leaf.shape, str(leaf.dtype), treatment, leaf.size, skipped, wire, full)


def _shards(shapes: Any, mesh: Any, param_specs: Any) -> Any:
    """The shapes of one device's shards."""
    specs = broadcast_specs(jax.sharding.PartitionSpec() if param_specs is None else param_specs, shapes)

    def shard(shape: Any, spec: Any) -> Any:
        local = jax.sharding.NamedSharding(mesh, spec).shard_shape(shape.shape)
        return jax.ShapeDtypeStruct(local, shape.dtype)

    return jax.tree.map(shard, shapes, specs)
