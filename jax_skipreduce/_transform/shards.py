"""The shapes of what one worker holds of each parameter, before a run and during it."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jax_skipreduce._gradients.specs import axes_of, broadcast_specs, is_spec, specs_of_types
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
    axes: frozenset[Hashable]
    num_parts: int
    num_workers: int

    @property
    def num_rows(self) -> int:
        """Rows of state, one for each worker of the data axis and each part."""
        return self.num_workers * self.num_parts


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
    flat = [jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in jax.tree.leaves(params)]
    if group is not None:
        varying = [varying_axes(leaf) - set(group.names) for leaf in jax.tree.leaves(params)]
        return [Shard(leaf, axes, 1, group.size) for leaf, axes in zip(flat, varying, strict=True)]
    mesh = settings.mesh
    ambient = jax.sharding.get_abstract_mesh()
    names = axis_names(settings.axis_name)
    if num_workers is None:
        known = mesh if mesh is not None else ambient
        if not all(name in known.axis_names for name in names):
            raise ValueError(
                f"{settings.compressor.name} keeps state per worker, and how many workers axis_name="
                f"{settings.axis_name!r} has is not known here: call tx.init in a context of jax.set_mesh(mesh), "
                "inside jax.shard_map, or give mesh="
            )
        num_workers = prod(known.shape[name] for name in names)
    if mesh is None and settings.param_specs is not None:
        if ambient.empty:
            raise ValueError(
                "param_specs is given, but no mesh, so the sizes of shards are not known here: call this in a "
                "context of jax.set_mesh(mesh)"
            )
        mesh = ambient
    if mesh is None:
        return [Shard(leaf, frozenset(), 1, num_workers) for leaf in flat]
    given = settings.param_specs
    specs = specs_of_types(params) if given is None else broadcast_specs(given, params)
    shards = []
    for leaf, spec in zip(flat, jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        axes = axes_of(spec)
        held = jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape)
        parts = prod(mesh.shape[name] for name in axes)
        shards.append(Shard(jax.ShapeDtypeStruct(held, leaf.dtype), axes, parts, num_workers))
    return shards
