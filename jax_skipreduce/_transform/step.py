"""One step: gradients of this worker -> their mean over the workers."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jax_skipreduce._collectives.hierarchy import reduce_hierarchically
from jax_skipreduce._gradients.buckets import order_of_use
from jax_skipreduce._gradients.in_full import reduce_in_full
from jax_skipreduce._gradients.local import check_local
from jax_skipreduce._gradients.selection import ByPath, indices_of
from jax_skipreduce._transform.plan import plan_step
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._transform.state import put_row, take_row
from jax_skipreduce._workers.axes import bound_axes, varying_axes
from jax_skipreduce._workers.group import Group


def reduce_gradients(
    settings: Settings, group: Group, grads: Any, count: jax.Array, per_worker: Any
) -> tuple[Any, Any]:
    """The gradients of this worker -> their mean over the workers, as `settings` say for step `count`.

    Args:
      settings: the settings of the transformation.
      group: the workers along `settings.axis_name`.
      grads: the gradients, each with the shape and dtype of what this worker holds of the parameter.
      count: the step counter.
      per_worker: `SkipReduceState.per_worker` as this worker holds it.

    Returns:
      The means in the same structure, and `per_worker` for the next step.
    """
    leaves, treedef = jax.tree.flatten(grads)
    everybody = bound_axes(settings.all_axes)
    check_local(grads, everybody, group.tracked)
    plan = plan_step(settings, grads, [varying_axes(leaf) for leaf in leaves], group.size, count)
    if plan.protects_nothing and isinstance(settings.protect, ByPath) and leaves and not _is_masked(grads):
        # Other functions, and masks, may rightly protect nothing; so may a pattern in a part of the tree.
        warnings.warn(
            f"protect={settings.protect!r} matches no leaf, so nothing is protected: a mistyped path? sr.describe "
            "shows the paths",
            stacklevel=2,
        )
    states = take_row(settings, group, grads, plan.treatments, per_worker)
    fast = bound_axes(settings.fast_axes) if settings.fast_axes else ()
    # An empty leaf sends nothing, but its result has to be typed as the same on all workers.
    reduced = [
        leaf if leaf.size or leaf.dtype == jax.dtypes.float0 else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves
    ]

    plans = settings.compressor.plan_buckets(plan.bucket_values(), group, count)
    for number in order_of_use(plan.buckets):
        bucket, kept = plan.buckets[number], [states[i] for i in plan.buckets[number]]

        def compress(arrays: Sequence[jax.Array], number: int = number, kept: list[Any] = kept) -> Sequence[jax.Array]:
            means, kept[:] = settings.compressor.reduce(arrays, list(kept), plans[number], group)
            return means

        means = reduce_hierarchically([leaves[i] for i in bucket], fast, compress)
        for index, mean, state in zip(bucket, means, kept, strict=True):
            reduced[index], states[index] = mean, state

    # The leaves that are reduced in full come last: their one call has to wait for all of them.
    in_full = indices_of(plan.treatments, "protected", "integer", "small")
    for index, mean in zip(in_full, reduce_in_full([leaves[i] for i in in_full], everybody), strict=True):
        reduced[index] = mean
    return jax.tree.unflatten(treedef, reduced), put_row(settings.compressor.name, group, states, per_worker)


def _is_masked(grads: Any) -> bool:
    """Whether `optax.masked` or `optax.partition` shows a part of the tree."""

    def is_masked(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return any(map(is_masked, jax.tree.leaves(grads, is_leaf=is_masked)))
