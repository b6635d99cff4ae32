"""The shapes of what one worker holds of each parameter, before a run and during it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_skipreduce._gradients.specs import axes_in_order, broadcast_specs, checked_specs, is_spec, specs_of_types
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._workers.axes import axis_names, varying_axes
from jax_skipreduce._workers.group import Group


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one worker holds of a parameter.

    Attributes:
      leaf: shape and dtype of the shard.
      axes: axes, other than the data axis, over which shards differ.
      num_parts: workers along `axes`, which is the number of parts that the parameter is cut in.
      num_workers: N.
    """

    leaf: jax.ShapeDtypeStruct
    axes: tuple[Hashable, ...]
    num_parts: int
    num_workers: int


def shards_of(settings: Settings, params: Any, group: Group | None, num_workers: int | None = None) -> list[Shard]:
    """The shards of `params`, in order.

    Args:
      settings: settings with the mesh and `param_specs`, which say how parameters are sharded.
      params: the parameters, or their shapes.
      group: the workers, if their axis is bound. Then parameters are shards already.
      num_workers: N, if it is known; else the mesh has it.

    Raises:
      ValueError: N is not known.
    """
    leaves = jax.tree.leaves(params)
    flat = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]
    ambient = jax.sharding.get_abstract_mesh()
    if group is not None:
        remaining = [name for name in ambient.axis_names if name not in ambient.manual_axes]
        if not remaining or group.is_simulated:
            varying = [tuple(sorted(varying_axes(leaf) - set(group.names), key=str)) for leaf in leaves]
            return [Shard(leaf, axes, 1, group.size) for leaf, axes in zip(flat, varying, strict=True)]
        return _cut(flat, checked_specs(settings.param_specs, params, remaining, num_leading=0), ambient, group.size)
    mesh, given = settings.mesh, settings.param_specs
    knows_workers = num_workers is not None
    if num_workers is None:
        known, names = mesh if mesh is not None else ambient, axis_names(settings.axis_name)
        if not all(name in known.axis_names for name in names):
            raise ValueError(
                f"{settings.compressor.name} keeps state per worker, and how many workers axis_name="
                f"{settings.axis_name!r} has is not known here: call tx.init in a context of jax.set_mesh(mesh), "
                "inside jax.shard_map, or give mesh="
            )
        num_workers = prod(known.shape[name] for name in names)
    if mesh is None and given is not None:
        if ambient.empty:
            raise ValueError(
                "param_specs is given, but no mesh, so the sizes of shards are not known here: call this in a "
                "context of jax.set_mesh(mesh)"
            )
        mesh = ambient
    if mesh is None and not knows_workers and any(isinstance(leaf, jax.Array) for leaf in leaves):
        mesh = ambient  # Explicit axes, of which types tell
    if mesh is None:
        return [Shard(leaf, (), 1, num_workers) for leaf in flat]
    specs = specs_of_types(params) if given is None else broadcast_specs(given, params)
    return _cut(flat, specs, mesh, num_workers)


def _cut(flat: Sequence[jax.ShapeDtypeStruct], specs: Any, mesh: Any, num_workers: int) -> list[Shard]:
    """The shards of whole parameters that are sharded over `mesh` as `specs` say."""
    shards = []
    for leaf, spec in zip(flat, jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        axes = axes_in_order(spec)
        pieces = [prod(mesh.shape[name] for name in axes_in_order(PartitionSpec(entry))) for entry in spec]
        pieces += [1] * (len(leaf.shape) - len(pieces))
        for size, number in zip(leaf.shape, pieces, strict=True):
            if size % number:
                raise ValueError(f"a parameter of shape {leaf.shape} cannot be cut as {spec} says, in {pieces} parts")
        held = tuple(size // number for size, number in zip(leaf.shape, pieces, strict=True))
        shards.append(Shard(jax.ShapeDtypeStruct(held, leaf.dtype), axes, prod(pieces), num_workers))
    return shards
