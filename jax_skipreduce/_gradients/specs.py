"""PartitionSpecs of parameters: how each leaf is sharded over mesh axes other than the data axis."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jax_skipreduce._gradients.paths import leaf_paths


def broadcast_specs(param_specs: Any, tree: Any) -> Any:
    """One PartitionSpec per leaf of `tree`.

    Raises:
      ValueError: `param_specs` is not a prefix of `tree`.
    """
    try:
        return jax.tree.broadcast(param_specs, tree, is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            "param_specs does not match the tree of parameters: expected a PartitionSpec for each parameter, "
            f"or a prefix of the tree. JAX says: {str(error).splitlines()[0]}"
        ) from None


def specs_of_types(tree: Any, num_leading: int = 0) -> Any:
    """How the leaves of `tree` are sharded over Explicit axes, by their types. Types say nothing about Auto axes.

    The first `num_leading` dimensions are left out.
    """
    return jax.tree.map(lambda leaf: PartitionSpec(*jax.typeof(leaf).sharding.spec[num_leading:]), tree)


def axes_of(spec: PartitionSpec) -> frozenset[Hashable]:
    """The axes that `spec` names."""
    return frozenset(axes_in_order(spec))


def axes_in_order(spec: PartitionSpec) -> tuple[Hashable, ...]:
    """The axes that `spec` names, in the order of the dimensions."""
    names = [name for entry in spec for name in (entry if isinstance(entry, tuple) else (entry,))]
    return tuple(name for name in names if name is not None)


def is_spec(x: Any) -> bool:
    """Whether `x` is a PartitionSpec, which JAX takes for a pytree."""
    return isinstance(x, PartitionSpec)


def checked_specs(param_specs: Any, grads: Any, available: Sequence[Any], num_leading: int) -> Any:
    """One PartitionSpec over the `available` axes per parameter, checked.

    Args:
      param_specs: what the user gave.
      grads: the gradients, with `num_leading` dimensions more than the parameters.
      available: axes that parameters may be sharded over.
      num_leading: 1 where gradients are stacked by worker, else 0.
    """
    specs = specs_of_types(grads, num_leading) if param_specs is None else broadcast_specs(param_specs, grads)
    for path, spec, leaf in zip(
        leaf_paths(grads), jax.tree.leaves(specs, is_leaf=is_spec), jax.tree.leaves(grads), strict=True
    ):
        where = f"param_specs has {spec} for {path!r}"
        if not is_spec(spec):
            raise TypeError(f"{where}: expected a PartitionSpec")
        other = sorted(str(name) for name in axes_of(spec) - set(available))
        if other:
            raise ValueError(f"{where}: parameters can be sharded over {available} here, not over {', '.join(other)}")
        if len(spec) > jnp.ndim(leaf) - num_leading:
            raise ValueError(f"{where}: expected at most {jnp.ndim(leaf) - num_leading} entries, one per dimension")
    return specs
