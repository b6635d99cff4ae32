"""Gradients <-> buckets: which leaves travel together, and how they are cut in slices.

Each leaf is padded and cut in N slices of its own; slice j of a bucket is the slices j of its
leaves, joined (see `_execute.reduce_blocks`). So each layer loses k/N of its elements per
worker. DDP cuts the flattened bucket instead: there a slice covers whole layers, and a worker's
contribution to a layer vanishes all at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_skipreduce._backends.ppermute import Ring, is_large
from jax_skipreduce._workers.axes import varying_axes


def group_of(leaf: Any, varying: frozenset[Hashable]) -> Hashable:
    """Leaves with the same answer may share a bucket.

    One dtype, because nothing is cast; and one set of axes that they vary over, because joining a
    leaf that is sharded over a model axis with one that is not would make both vary over it.
    """
    return jnp.dtype(leaf.dtype).name, varying


def make_buckets(leaves: Sequence[Any], groups: Mapping[int, Hashable], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Puts leaves into buckets, in their order.

    Args:
      leaves: arrays, or anything with size and dtype.
      groups: of each leaf that goes into a bucket, by its index in `leaves`; see `group_of`.
      bucket_bytes: size up to which a bucket is filled. A larger leaf is a bucket of its own.

    Returns:
      For each bucket the indices of its leaves, ordered by its first one.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index, group in sorted(groups.items(), key=lambda item: item[0]):
        num_bytes = leaves[index].size * jnp.dtype(leaves[index].dtype).itemsize
        bucket, filled = open_buckets.get(group, (None, 0))
        if bucket is None or filled + num_bytes > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[group] = (bucket, filled + num_bytes)
    return [tuple(bucket) for bucket in buckets]


def reduce_in_full(leaves: Sequence[jax.Array], ring: Ring) -> list[jax.Array]:
    """`lax.pmean` of every leaf, in one call, in which all but large ones are joined.

    XLA makes one collective of each array, and a short one takes the time of its steps, not of its bytes.
    """
    if not leaves:
        return []
    alone = [i for i, leaf in enumerate(leaves) if is_large(leaf)]
    groups: dict[Hashable, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if i not in alone:
            groups.setdefault(group_of(leaf, varying_axes(leaf)), []).append(i)
    joined = [jnp.concatenate([leaves[i].reshape(-1) for i in members]) for members in groups.values()]
    means = lax.pmean([*(leaves[i] for i in alone), *joined], ring.names)
    result: dict[int, jax.Array] = dict(zip(alone, means, strict=False))
    for members, vector in zip(groups.values(), means[len(alone) :], strict=True):
        start = 0
        for i in members:
            part = lax.slice_in_dim(vector, start, start + leaves[i].size)
            result[i] = part.reshape(leaves[i].shape)
            start += leaves[i].size
    return [result[i] for i in range(len(leaves))]
