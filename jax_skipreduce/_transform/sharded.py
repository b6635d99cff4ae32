"""Parameters that are sharded over other axes: each shard is reduced by itself.

Flattening a gradient gathers it over every axis that it is sharded over, unless that axis is manual.
So the reduction runs in a shard_map that makes the remaining axes manual: nested in the shard_map of the
user, or, in pjit programs, over the whole mesh, with gradients stacked by worker.
"""

from __future__ import annotations

import warnings
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.specs import axes_in_order, axes_of, checked_specs, is_spec
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._transform.state import specs_of_rows
from jax_skipreduce._transform.step import reduce_gradients
from jax_skipreduce._workers.group import Group


def reduce_local(settings: Settings, grads: Any, count: Any, per_worker: Any) -> tuple[Any, Any]:
    """The mean of local gradients, where `settings.axis_name` is bound, and what this worker keeps.

    Raises:
      ValueError: `param_specs` is given where no axis is left that it could name.
    """
    group, param_specs = Group.of(settings.axis_name), settings.param_specs
    mesh = jax.sharding.get_abstract_mesh()
    remaining = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if not remaining:
        if param_specs is not None:
            raise ValueError(
                f"param_specs={param_specs}: there is no mesh axis here that is not manual, so gradients are shards "
                "already. Leave it out; it is for jax.shard_map(.., axis_names=..) over some of the axes, or with "
                "mesh= for pjit programs"
            )
        return reduce_gradients(settings, group, grads, count, per_worker)
    arrays = _without_float0(grads)
    specs = checked_specs(param_specs, arrays, remaining, num_leading=0)
    if not any(axes_of(spec) for spec in jax.tree.leaves(specs, is_leaf=is_spec)):
        return reduce_gradients(settings, group, grads, count, per_worker)  # over Auto axes that nothing is said of
    entries = _without_entries(grads, per_worker)
    rows = _row_specs(specs, entries, ())

    def reduce(arrays: Any, count: Any, per_worker: Any, rank: jax.Array) -> tuple[Any, Any]:
        return reduce_gradients(settings, Group.of(settings.axis_name, rank), arrays, count, per_worker)

    shared = PartitionSpec()
    mapped = jax.shard_map(
        reduce,
        in_specs=(specs, shared, rows, shared),
        out_specs=(specs, rows),
        axis_names=set(remaining),
        check_vma=group.tracked,
    )
    means, kept = mapped(arrays, count, entries, group.rank)
    return _with_float0(grads, means, num_leading=0), _with_entries(grads, kept)


def reduce_stacked(settings: Settings, grads: Any, count: Any, params: Any, per_worker: Any) -> tuple[Any, Any]:
    """The mean over the leading axis of every leaf, sharded as `param_specs` says, and what the workers keep."""
    mesh, names, others = settings.mesh, settings.all_axes, settings.other_axes
    bound = [name for name in names if name in jax.sharding.get_abstract_mesh().manual_axes]
    if bound:
        raise ValueError(
            f"mesh was given, but {bound} are manual axes here: inside jax.shard_map, leave mesh= out and pass local "
            "gradients"
        )
    _check_rows(grads, params, names, prod(mesh.shape[name] for name in names))
    _warn_of_auto_axes(settings)
    arrays = _without_float0(grads)
    specs = checked_specs(settings.param_specs, arrays, others, num_leading=1)
    stacked = jax.tree.map(lambda spec: PartitionSpec(names, *spec), specs, is_leaf=is_spec)
    entries = _without_entries(grads, per_worker)
    rows = _row_specs(specs, entries, names)

    def reduce(rows: Any, count: Any, per_worker: Any) -> tuple[Any, Any]:
        own = jax.tree.map(lambda row: row[0], rows)
        return reduce_gradients(settings, Group.of(settings.axis_name), own, count, per_worker)

    mapped = jax.shard_map(
        reduce,
        mesh=mesh,
        in_specs=(stacked, PartitionSpec(), rows),
        out_specs=(specs, rows),
        axis_names=set(mesh.axis_names),
    )
    means, kept = mapped(arrays, count, entries)
    return _with_float0(grads, means, num_leading=1), _with_entries(grads, kept)


def _row_specs(specs: Any, per_worker: Any, names: tuple[Any, ...]) -> Any:
    """How rows of state are sharded: over the data axes `names`, and the axes that their parameter is sharded over."""
    rows = [PartitionSpec((*names, *axes_in_order(spec)) or None) for spec in jax.tree.leaves(specs, is_leaf=is_spec)]
    if not isinstance(per_worker, (tuple, list)) or len(per_worker) != len(rows):
        return jax.tree.map(lambda _: PartitionSpec(names or None), per_worker)  # `take_row` says what is wrong
    return specs_of_rows(per_worker, rows)


def _warn_of_auto_axes(settings: Settings) -> None:
    """Warns, once per place, that Auto axes may cost all-gathers: types do not say how they shard parameters."""
    if settings.param_specs is not None:
        return
    mesh = settings.mesh
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    auto = [name for name in settings.other_axes if types[name] == AxisType.Auto and mesh.shape[name] > 1]
    if auto:
        warnings.warn(
            f"the mesh has Auto axes {auto} beside the data axis, and param_specs is None: parameters that are sharded "
            "over them are gathered in every step. Give param_specs, the PartitionSpec of each parameter "
            "(param_specs=jax.sharding.PartitionSpec() if none is sharded)",
            stacklevel=2,
        )


def _check_rows(grads: Any, params: Any, names: tuple[Any, ...], num_workers: int) -> None:
    """Raises ValueError if a gradient is not one row per worker of its parameter."""
    if params is None:
        raise ValueError(
            "params=None: with mesh=, call update(grads, state, params). Their shapes tell gradients that are "
            "stacked by worker from gradients that are not"
        )
    if jax.tree.structure(params) != jax.tree.structure(grads):
        raise ValueError(
            f"params and gradients differ in structure: {jax.tree.structure(params)} and {jax.tree.structure(grads)}"
        )
    for path, leaf, param in zip(leaf_paths(grads), jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        expected = (num_workers, *jnp.shape(param))
        if jnp.shape(leaf) != expected:
            raise ValueError(
                f"the gradient {path!r} has shape {jnp.shape(leaf)}: with mesh=, expected {expected}, one "
                f"row per worker of {names}. Stack local gradients with jax.vmap(jax.grad(loss_fn), "
                f"in_axes=(None, 0), spmd_axis_name={names!r}) over a batch of shape ({num_workers}, local batch, ..)"
            )


def _is_float0(leaf: Any) -> bool:
    """Whether `leaf` is a gradient of integers. Such a gradient is empty and cannot go through a shard_map."""
    return leaf.dtype == jax.dtypes.float0


def _without_float0(grads: Any) -> Any:
    return jax.tree.map(lambda leaf: None if _is_float0(leaf) else leaf, grads)


def _with_float0(grads: Any, reduced: Any, num_leading: int) -> Any:
    def put_back(before: Any, after: Any) -> Any:
        return np.zeros(before.shape[num_leading:], jax.dtypes.float0) if _is_float0(before) else after

    return jax.tree.map(put_back, grads, reduced)


def _without_entries(grads: Any, per_worker: Any) -> Any:
    """The state of workers without the entries of float0 gradients, which have no state."""
    leaves = jax.tree.leaves(grads)
    if not isinstance(per_worker, (tuple, list)) or len(per_worker) != len(leaves):
        return per_worker
    return tuple(entry for entry, leaf in zip(per_worker, leaves, strict=True) if not _is_float0(leaf))


def _with_entries(grads: Any, kept: Any) -> Any:
    if not kept:
        return kept
    entries = iter(kept)
    return tuple(None if _is_float0(leaf) else next(entries) for leaf in jax.tree.leaves(grads))
