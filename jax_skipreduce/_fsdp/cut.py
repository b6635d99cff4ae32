"""fsdp_cut() and fsdp_join(): whole weights <-> the shards that `fsdp_gather` takes."""

from __future__ import annotations

import operator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._workers.blocks import from_block, to_block


def fsdp_cut(tree: Any, num_workers: int) -> Any:
    """Cuts weights as `fsdp_gather` takes them: each is flattened, padded with zeros and cut in N slices, end to end.

    Args:
      tree: pytree of arrays. Layers that are stacked for `lax.scan` are cut one by one:
        ``jax.vmap(lambda layer: sr.fsdp_cut(layer, num_workers))(layers)``.
      num_workers: N. Outside of ``shard_map``, shard the result with ``P(axis_name)`` (stacked layers with
        ``P(None, axis_name)``). Worker r then gets slice r.

    Returns:
      A pytree of 1-D arrays of N * ceil(size / N) elements, in the dtypes of `tree`.

    Raises:
      ValueError: `num_workers` is less than 1.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> sr.fsdp_cut(jnp.arange(6.0).reshape(2, 3), num_workers=4)
      Array([0., 1., 2., 3., 4., 5., 0., 0.], dtype=float32)
    """
    if num_workers < 1:
        raise ValueError(f"num_workers={num_workers}: expected at least 1")
    return jax.tree.map(lambda x: to_block(jnp.asarray(x), num_workers).reshape(-1), tree)


def fsdp_join(tree: Any, shape: Any) -> Any:
    """The inverse of `fsdp_cut`: whole weights, for a test of the model or a checkpoint that any N can read.

    Args:
      tree: pytree of arrays as `fsdp_cut` makes them.
      shape: the original shape of each array: a pytree of the same structure, of tuples or of anything with a
        ``shape``, such as the result of `jax.eval_shape`.

    Returns:
      A pytree of arrays with the original shapes.

    Raises:
      ValueError: an array is too short for its shape, or `shape` has another structure.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> sr.fsdp_join(jnp.arange(8.0), (2, 3))
      Array([[0., 1., 2.],
             [3., 4., 5.]], dtype=float32)
    """
    leaves, structure = jax.tree.flatten(tree)
    joined = []
    for path, leaf, wanted in zip(leaf_paths(tree), leaves, shapes_of(shape, structure), strict=True):
        if leaf.size < prod(wanted):
            raise ValueError(f"leaf {path!r} has {leaf.size} elements, fewer than its shape {wanted}")
        joined.append(from_block(leaf, wanted))
    return jax.tree.unflatten(structure, joined)


def shapes_of(shape: Any, structure: Any) -> list[tuple[int, ...]]:
    """The shapes that users name for a tree of this structure."""
    try:
        leaves = structure.flatten_up_to(shape)
        return [tuple(map(operator.index, leaf.shape if hasattr(leaf, "shape") else leaf)) for leaf in leaves]
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"shape={shape!r}: expected for each array the shape of the whole, in the same structure: {error}"
        ) from None
