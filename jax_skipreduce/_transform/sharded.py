"""Parameters that are sharded over other axes: each shard is reduced by itself.

Flattening a gradient gathers it over every axis that it is sharded over, unless that axis is manual.
So the reduction runs in a shard_map that makes the remaining axes manual: a nested one inside of the
user's, or, in pjit programs, one over the whole mesh, to which gradients come stacked by worker.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jax_skipreduce._backends.ppermute import Ring
from jax_skipreduce._checks.replicas import check_replicas_when
from jax_skipreduce._gradients.selection import leaf_paths
from jax_skipreduce._transform.step import Config, reduce_gradients


def reduce_local(config: Config, param_specs: Any, grads: Any, count: Any) -> Any:
    """The mean of local gradients, where `config.axis_name` is bound.

    Raises:
      ValueError: `param_specs` is given where no axis is left that it could name.
    """
    ring = Ring.of(config.axis_name)
    mesh = jax.sharding.get_abstract_mesh()
    remaining = [name for name in mesh.axis_names if name not in mesh.manual_axes]
    if not remaining:
        if param_specs is not None:
            raise ValueError(
                f"param_specs={param_specs}: there is no mesh axis here that is not manual, so gradients are shards "
                "already. Leave it out; it is for jax.shard_map(.., axis_names=..) over some of the axes, or with "
                "mesh= for pjit programs"
            )
        return reduce_gradients(config, ring, grads, count)
    arrays = _without_float0(grads)
    specs = _specs(param_specs, arrays, remaining, num_leading=0)
    if not any(axes_of(spec) for spec in jax.tree.leaves(specs, is_leaf=_is_spec)):
        return reduce_gradients(config, ring, grads, count)  # over Auto axes that nothing is said of

    def reduce(arrays: Any, count: Any, rank: jax.Array) -> Any:
        # The rank comes in as an operand: JAX 0.10.0 cannot lower axis_index of the outer axis here.
        return reduce_gradients(config, dataclasses.replace(ring, rank=rank), arrays, count)

    shared = PartitionSpec()
    mapped = jax.shard_map(
        reduce,
        in_specs=(specs, shared, shared),
        out_specs=specs,
        axis_names=set(remaining),
        check_vma=ring.tracked,
    )
    return _with_float0(grads, mapped(arrays, count, ring.rank), num_leading=0)


def reduce_stacked(config: Config, mesh: Any, param_specs: Any, grads: Any, count: Any, params: Any) -> Any:
    """The mean over the leading axis of every leaf, sharded as `param_specs` says."""
    names = config.all_axes
    bound = [name for name in names if name in jax.sharding.get_abstract_mesh().manual_axes]
    if bound:
        raise ValueError(
            f"mesh was given, but {bound} are manual axes here: inside jax.shard_map, leave mesh= out and pass local "
            "gradients"
        )
    _check_rows(grads, params, names, prod(mesh.shape[name] for name in names))
    arrays = _without_float0(grads)
    specs = _specs(param_specs, arrays, [name for name in mesh.axis_names if name not in names], num_leading=1)
    stacked_specs = jax.tree.map(lambda spec: PartitionSpec(names, *spec), specs, is_leaf=_is_spec)

    def reduce(rows: Any, count: Any) -> Any:
        return reduce_gradients(config, Ring.of(config.axis_name), jax.tree.map(lambda row: row[0], rows), count)

    mapped = jax.shard_map(
        reduce,
        mesh=mesh,
        in_specs=(stacked_specs, PartitionSpec()),
        out_specs=specs,
        axis_names=set(mesh.axis_names),
    )
    return _with_float0(grads, mapped(arrays, count), num_leading=1)


def check_parameters(config: Config, mesh: Any, param_specs: Any, params: Any, count: Any) -> None:
    """Compares parameters over the workers, in the steps that `config.check_every` names."""
    if params is None:
        raise ValueError(
            f"params=None: with check_every={config.check_every}, call update(grads, state, params), which are compared"
        )

    def check_now(params: Any, count: Any) -> None:
        check_replicas_when(count % config.check_every == 0, params, config.all_axes, "parameters")

    if mesh is None:
        check_now(params, count)
        return
    # What each device holds, which the types of a pjit program take to be the same.
    specs = _specs(param_specs, params, [name for name in mesh.axis_names if name not in config.all_axes], 0)
    jax.shard_map(
        check_now,
        mesh=mesh,
        in_specs=(specs, PartitionSpec()),
        out_specs=None,
        axis_names=set(mesh.axis_names),
    )(params, count)


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
            f"or a prefix of the tree. JAX says: {str(error).splitlines()[0]}"
        ) from None


def specs_of_types(tree: Any, num_leading: int = 0) -> Any:
    """How the leaves of `tree` are sharded over Explicit axes, which their types say; of Auto axes they say nothing.

    The first `num_leading` dimensions are left out.
    """
    return jax.tree.map(lambda leaf: PartitionSpec(*jax.typeof(leaf).sharding.spec[num_leading:]), tree)


def axes_of(spec: PartitionSpec) -> frozenset[Hashable]:
    """The axes that `spec` names."""
    names = [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))]
    return frozenset(name for name in names if name is not None)


def _is_spec(x: Any) -> bool:
    return isinstance(x, PartitionSpec)


def _specs(param_specs: Any, grads: Any, available: Sequence[Any], num_leading: int) -> Any:
    """One PartitionSpec over the `available` axes per parameter, checked.

    Args:
      param_specs: what the user gave.
      grads: the gradients, with `num_leading` dimensions more than the parameters.
      available: axes that parameters may be sharded over.
      num_leading: 1 where gradients are stacked by worker, else 0.
    """
    specs = specs_of_types(grads, num_leading) if param_specs is None else broadcast_specs(param_specs, grads)
    for path, spec, leaf in zip(
        leaf_paths(grads), jax.tree.leaves(specs, is_leaf=_is_spec), jax.tree.leaves(grads), strict=True
    ):
        where = f"param_specs has {spec} for {path!r}"
        if not _is_spec(spec):
            raise TypeError(f"{where}: expected a PartitionSpec")
        other = sorted(str(name) for name in axes_of(spec) - set(available))
        if other:
            raise ValueError(f"{where}: parameters can be sharded over {available} here, not over {', '.join(other)}")
        if len(spec) > jnp.ndim(leaf) - num_leading:
            raise ValueError(f"{where}: expected at most {jnp.ndim(leaf) - num_leading} entries, one per dimension")
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
    for path, leaf, param in zip(leaf_paths(grads), jax.tree.leaves(grads), jax.tree.leaves(params), strict=True):
        expected = (num_workers, *jnp.shape(param))
        if jnp.shape(leaf) != expected:
            raise ValueError(
                f"the gradient {path!r} has shape {jnp.shape(leaf)}: with mesh=, expected {expected}, one "
                f"row per worker of {names}. Stack local gradients with jax.vmap(jax.grad(loss_fn), "
                f"in_axes=(None, 0), spmd_axis_name={names!r}) over a batch of shape ({num_workers}, local batch, ..)"
            )


def _is_float0(leaf: Any) -> bool:
    """Whether `leaf` is the gradient of integers, which holds nothing and cannot go through a shard_map."""
    return leaf.dtype == jax.dtypes.float0


def _without_float0(grads: Any) -> Any:
    return jax.tree.map(lambda leaf: None if _is_float0(leaf) else leaf, grads)


def _with_float0(grads: Any, reduced: Any, num_leading: int) -> Any:
    def put_back(before: Any, after: Any) -> Any:
        return np.zeros(before.shape[num_leading:], jax.dtypes.float0) if _is_float0(before) else after

    return jax.tree.map(put_back, grads, reduced)
