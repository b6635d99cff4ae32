"""Gradients that are reduced in full: protected and small ones, and integers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jax_skipreduce._gradients.buckets import group_key
from jax_skipreduce._workers.axes import varying_axes
from jax_skipreduce._workers.blocks import is_large


def reduce_in_full(leaves: Sequence[jax.Array], names: tuple[Hashable, ...]) -> list[jax.Array]:
    """`lax.pmean` of every leaf, in one call, with all leaves joined but the large ones.

    XLA makes one collective of each array, and a short collective takes the time of its steps, not of its bytes.
    """
    if not leaves:
        return []
    alone = [i for i, leaf in enumerate(leaves) if is_large(leaf)]
    groups: dict[Hashable, list[int]] = {}
    for i, leaf in enumerate(leaves):
        if i not in alone:
            groups.setdefault(group_key(leaf, varying_axes(leaf)), []).append(i)
    joined = [jnp.concatenate([leaves[i].reshape(-1) for i in members]) for members in groups.values()]
    means = lax.pmean([*(leaves[i] for i in alone), *joined], names)
    result: dict[int, jax.Array] = dict(zip(alone, means, strict=False))
    for members, vector in zip(groups.values(), means[len(alone) :], strict=True):
        start = 0
        for i in members:
            part = lax.slice_in_dim(vector, start, start + leaves[i].size)
            result[i] = part.reshape(leaves[i].shape)
            start += leaves[i].size
    return [result[i] for i in range(len(leaves))]
