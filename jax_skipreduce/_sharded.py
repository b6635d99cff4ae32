"""Parameters that are sharded over other axes: each shard is reduced by itself.

Flattening a gradient gathers it over every axis that it is sharded over, unless that axis is manual.
So the reduction runs in a shard_map that makes the remaining axes manual: a nested one inside of the
user's, or, in pjit programs, one over the whole mesh, to which gradients come stacked by worker.
"""

from __future__ import annotations

import functools
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_skipreduce import _axes
from jax_skipreduce._reduction import Config, reduce_gradients
from jax_skipreduce._selection import leaf_path


def reduce_local(config: Config, param_specs: Any, grads: Any, count: Any) -> Any:
    """The mean of local gradients, in a shard_map that is manual over `config.axis_name` at least.

    Raises:
      ValueError: `param_specs` is given where no axis is left that it could name.
    """
    names = _axes.bound_axes(config.axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    remaining = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if not remaining:
        if param_specs is not None:
            raise ValueError(
                f"param_specs={param_specs}: all mesh axes are manual here, so gradients are shards already. Leave "
                "it out; it is for jax.shard_map(.., axis_names=..) over some of the axes, or with mesh= for pjit "
                "programs"
            )
        return reduce_gradients(config, grads, count)
    specs = _specs(param_specs, grads, remaining, ())
    if not any(jax.tree.leaves(jax.tree.map(lambda spec: any(spec), specs, is_leaf=_is_spec))):
        return reduce_gradients(config, grads, count)  # over Auto axes that nothing is said of
    mapped = jax.shard_map(
        functools.partial(reduce_gradients, config),
        in_specs=(specs, PartitionSpec()),
        out_specs=specs,
        axis_names=set(remaining),
        check_vma=_axes.is_tracked(names),
    )
    return mapped(grads, count)


def reduce_stacked(config: Config, mesh: Any, param_specs: Any, grads: Any, count: Any, params: Any) -> Any:
    """The mean over the leading axis of every leaf, sharded as `param_specs` says."""
    names = _axes.axis_names(config.axis_name)
    bound = [name for name in names if name in jax.sharding.get_abstract_mesh().manual_axes]
    if bound:
        raise ValueError(
            f"mesh was given, but {bound} are manual axes here: inside jax.shard_map, leave mesh= out and pass local "
            "gradients"
        )
    _check_rows(grads, params, names, prod(mesh.shape[name] for name in names))
    specs = _specs(param_specs, grads, [name for name in mesh.axis_names if name not in names], (None,))
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


def _specs(param_specs: Any, grads: Any, available: list[Any], leading: tuple[None, ...]) -> Any:
    """One PartitionSpec over the `available` axes per parameter, checked.

    Args:
      param_specs: what the user gave.
      grads: the gradients, which have as many dimensions more than the parameters as `leading`.
      available: axes that parameters may be sharded over.
      leading: one entry per leading dimension.
    """
    if param_specs is None:
        # With Explicit axes the type of a gradient says how it is sharded; of Auto axes it says nothing.
        specs = jax.tree.map(lambda leaf: PartitionSpec(*jax.typeof(leaf).sharding.spec[len(leading) :]), grads)
    else:
        specs = broadcast_specs(param_specs, grads)
    flat = jax.tree_util.tree_flatten_with_path(specs, is_leaf=_is_spec)[0]
    for (path, spec), leaf in zip(flat, jax.tree.leaves(grads), strict=True):
        where = f"param_specs has {spec} for {leaf_path(path)!r}"
        if not _is_spec(spec):
            raise TypeError(f"{where}: expected a PartitionSpec")
        used = [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))]
        other = sorted({str(name) for name in used if name is not None and name not in available})
        if other:
            raise ValueError(f"{where}: parameters can be sharded over {available} here, not over {', '.join(other)}")
        num_dimensions = jnp.ndim(leaf) - len(leading)
        if len(spec) > num_dimensions:
            raise ValueError(f"{where}: expected at most {num_dimensions} entries, one per dimension")
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
