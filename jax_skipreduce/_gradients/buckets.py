"""Buckets: which leaves travel together.

Each leaf is padded and cut in N slices of its own; slice j of a bucket is the slices j of its
leaves, joined (see `ppermute.reduce_blocks`). So each layer loses k/N of its elements per
worker. DDP cuts the flattened bucket instead: there a slice covers whole layers, and a worker's
contribution to a layer vanishes all at once.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp


def group_key(leaf: Any, varying: frozenset[Hashable]) -> Hashable:
    """A key of `leaf`: leaves with the same key may share a bucket.

    They have one dtype, because nothing is cast. They vary over the same axes, because joining a
    leaf that is sharded over a model axis with one that is not would make both vary over that axis.
    """
    return jnp.dtype(leaf.dtype).name, varying


def make_buckets(leaves: Sequence[Any], keys: Mapping[int, Hashable], bucket_bytes: int) -> list[tuple[int, ...]]:
    """Puts leaves into buckets, from the last one to the first.

    The backward pass has the gradients of the last layers first, so the first bucket that is full is the first that is
    ready. A bucket waits for no leaf that it does not hold. (DDP does the same.)

    Args:
      leaves: arrays, or anything with size and dtype.
      keys: the key of each leaf that goes into a bucket, by its index in `leaves`. Leaves of one key may share a
        bucket.
      bucket_bytes: size up to which a bucket is filled. A larger leaf is a bucket of its own.

    Returns:
      For each bucket the indices of its leaves, ascending. Buckets are numbered in the order of their first leaves;
      `order_of_use` has the order in which they are reduced.
    """
    buckets: list[list[int]] = []
    open_buckets: dict[Hashable, tuple[list[int], int]] = {}
    for index, key in sorted(keys.items(), key=lambda item: item[0], reverse=True):
        num_bytes = leaves[index].size * jnp.dtype(leaves[index].dtype).itemsize
        bucket, filled = open_buckets.get(key, (None, 0))
        if bucket is None or filled + num_bytes > bucket_bytes:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(index)
        open_buckets[key] = (bucket, filled + num_bytes)
    return sorted(tuple(sorted(bucket)) for bucket in buckets)


def order_of_use(buckets: Sequence[tuple[int, ...]]) -> list[int]:
    """The numbers of the buckets, in the order in which their gradients are ready."""
    return sorted(range(len(buckets)), key=lambda number: buckets[number][0], reverse=True)
