"""pjit programs: gradients stacked on a leading axis, one row per worker, reduced in a shard_map.

The shard_map is manual over all axes of the mesh, so that flattening a leaf works on the local
shard and nothing is gathered over a model axis.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
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
    _check_rows(grads, params, names, prod(mesh.shape[name] for name in names))
    specs = _specs(param_specs, grads, names, mesh)
    stacked_specs = jax.tree.map(lambda spec: PartitionSpec(names, *spec), specs, is_leaf=_is_spec)

    def reduce(local: Any, count: Any) -> Any:
        return reduce_gradients(config, jax.tree.map(lambda row: row[0], local), count)

    mapped = jax.shard_map(
        reduce,
        mesh=mesh,
        in_specs=(stacked_specs, PartitionSpec()),
        out_specs=specs,
        axis_names=set(mesh.axis_names),
    )
    return mapped(grads, count)


def broadcast_specs(param_specs: Any, tree: Any) -> Any:
    """One PartitionSpec per leaf of `tree`.

    Raises:
      ValueError: `param_specs` is not a prefix of `tree`.
    """
    try:
        return jax.tree.broadcast(param_specs, tree, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            "param_specs does not match the tree of parameters: expected a PartitionSpec for each parameter, "
            f"or a prefix of the tree. JAX says: {error}"
        ) from None


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _specs(param_specs: Any, grads: Any, names: tuple[Any, ...], mesh: Any) -> Any:
    """`param_specs`, checked, with one PartitionSpec per gradient."""
    if param_specs is None:
        # With Explicit axes the type of a gradient says how it is sharded; of Auto axes it says nothing.
        specs = jax.tree.map(lambda leaf: PartitionSpec(*jax.typeof(leaf).sharding.spec[1:]), grads)
    else:
        specs = broadcast_specs(param_specs, grads)
    flat = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)[0]
    for (path, spec), leaf in zip(flat, jax.tree.leaves(grads), strict=True):
        where = f"param_specs has {spec} for {leaf_path(path)!r}"
        if not _is_spec(spec):
            raise TypeError(f"{where}: expected a PartitionSpec")
        used = [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))]
        used = [name for name in used if name is not None]
        if set(used) & set(names):
            raise ValueError(f"{where}: parameters are reduced over {names}, so they cannot be sharded over it")
        if not set(used) <= set(mesh.axis_names):
            raise ValueError(f"{where}: the mesh has the axes {mesh.axis_names}")
        if len(spec) > leaf.ndim - 1:
            raise ValueError(f"{where}, whose shape is {leaf.shape[1:]}: expected at most {leaf.ndim - 1} entries")
    return specs


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
    flat = jax.tree_util.tree_flatten_with_path(grads)[0]
    for (path, leaf), param in zip(flat, jax.tree.leaves(params), strict=True):
        expected = (num_workers, *jnp.shape(param))
        if jnp.shape(leaf) != expected:
            raise ValueError(
                f"the gradient {leaf_path(path)!r} has shape {jnp.shape(leaf)}: with mesh=, expected {expected}, one "
                f"row per worker of {names}. Stack local gradients with jax.vmap(jax.grad(loss_fn), "
                f"in_axes=(None, 0), spmd_axis_name={names!r}) over a batch of shape ({num_workers}, local batch, ..)"
            )
