"""Methods of the library by name, whatever state they keep, in a program over one mesh axis."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jax_skipreduce._transform.registry import METHODS


def names() -> tuple[str, ...]:
    """The names that compressors are registered under."""
    return tuple(METHODS)


def make(name: str, axis_name: str, **settings: Any) -> Any:
    """The method called `name`: an object with ``transform()`` and ``describe(params, num_workers)``."""
    return METHODS[name](axis_name, **settings)


def init(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """The state of `tx` before the first step, as NumPy arrays; what workers keep for themselves has a row for each."""
    # Tells how many workers there are. Arrays stay on this process's default device.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.tree.map(np.asarray, tx.init(params))


def place(tree: Any, specs: Any, mesh: Mesh) -> Any:
    """A pytree of arrays that all processes computed alike, as arrays that are sharded by `specs`.

    Args:
      tree: arrays.
      specs: a `PartitionSpec` for each, or a prefix.
      mesh: of all workers.
    """

    def placed(spec: Any, part: Any) -> Any:
        def one(leaf: Any) -> jax.Array:
            value = np.asarray(leaf)
            # A copy per worker: steps may overwrite theirs.
            return jax.make_array_from_callback(
                value.shape, NamedSharding(mesh, spec), lambda index: np.array(value[index])
            )

        return jax.tree.map(one, part)

    return jax.tree.map(placed, specs, tree, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
