"""pjit programs: gradients stacked on a leading axis, one row per worker, reduced in a shard_map.

The shard_map is manual over all axes of the mesh, so that flattening a leaf works on the local
shard and nothing is gathered over a model axis.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jax_skipreduce import _axes
from jax_skipreduce._selection import leaf_path
from jax_skipreduce._transform import Config, reduce_gradients


def reduce_stacked(config: Config, mesh: Any, param_specs: Any, grads: Any, count: Any, params: Any) -> Any:
    """The mean over the leading axis of every leaf, with skipping, sharded as `param_specs` says."""
    names = _axes.axis_names(config.axis_name)
    bound = [name for name in names if name in jax.sharding.get_abstract_mesh().manual_axes]
    if bound:
        raise ValueError(
            f"mesh was given, but {bound} are manual axes here: inside jax.shard_map, leave mesh= and "
            "param_specs= out and pass local gradients"
        )
    specs = _specs(param_specs, grads, names)
    _check_rows(grads, params, names, prod(mesh.shape[name] for name in names))
    stacked_specs = jax.tree.map(lambda spec: PartitionSpec(names, *spec), specs, is_leaf=_is_spec)

    def reduce(local: Any, count: Any) -> Any:
        return reduce_gradients(config, jax.tree.map(lambda row: row[0], local), count)

    mapped = jax.shard_map(
        reduce, mesh=mesh, in_specs=(stacked_specs, PartitionSpec()), out_specs=specs, axis_names=set(mesh.axis_names)
    )
    return mapped(grads, count)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _specs(param_specs: Any, grads: Any, names: tuple[Any, ...]) -> Any:
    """`param_specs`, checked, with one PartitionSpec per gradient."""
    if param_specs is None:
        param_specs = PartitionSpec()
    try:
        specs = jax.tree.broadcast(param_specs, grads, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            "param_specs does not match the tree of gradients: expected a PartitionSpec for each parameter, "
            f"or a prefix of the tree. JAX says: {error}"
        ) from None
    for path, spec in jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)[0]:
        if not _is_spec(spec):
            raise TypeError(f"param_specs has {spec!r} for {leaf_path(path)!r}: expected a PartitionSpec")
        used = {name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))}
        if used & set(names):
            raise ValueError(
                f"param_specs has {spec} for {leaf_path(path)!r}: parameters are reduced over {names}, so they "
                "cannot be sharded over it"
            )
    return specs


def _check_rows(grads: Any, params: Any, names: tuple[Any, ...], num_workers: int) -> None:
    shapes = None if params is None else [leaf.shape for leaf in jax.tree.leaves(params)]
    flat = jax.tree_util.tree_flatten_with_path(grads)[0]
    for number, (path, leaf) in enumerate(flat):
        fits = leaf.ndim >= 1 and leaf.shape[0] == num_workers
        if fits and shapes is not None and len(shapes) == len(flat):
            fits = leaf.shape[1:] == shapes[number]
        if not fits:
            raise ValueError(
                f"the gradient {leaf_path(path)!r} has shape {leaf.shape}: with mesh=, expected one row per worker "
                f"of {names}, ({num_workers}, *shape of the parameter). Stack local gradients with "
                f"jax.vmap(jax.grad(loss_fn), in_axes=(None, 0), spmd_axis_name={names!r}) over a batch of shape "
                f"({num_workers}, local batch, ..)"
            )
