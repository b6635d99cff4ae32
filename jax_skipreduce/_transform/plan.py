"""The plan of a step: what happens to each leaf, and which leaves travel together.

The step itself and `describe` read the same plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jax_skipreduce._gradients.buckets import group_key, make_buckets
from jax_skipreduce._gradients.selection import Treatment, indices_of, protected_leaves, treatments
from jax_skipreduce._transform.compressor import LeafPlan
from jax_skipreduce._transform.settings import Settings


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """What a step does with a tree of gradients.

    Attributes:
      treatments: what happens to each leaf, in order.
      protects_nothing: whether `protect` was given but names no leaf.
      leaf_plans: what the compressor does with each leaf.
      buckets: indices of the leaves in each bucket.
    """

    treatments: list[Treatment]
    protects_nothing: bool
    leaf_plans: list[LeafPlan]
    buckets: list[tuple[int, ...]]

    def bucket_values(self) -> list[Any]:
        """What the compressor knows about the leaves of each bucket."""
        return [self.leaf_plans[bucket[0]].value for bucket in self.buckets]


def plan_step(
    settings: Settings, tree: Any, varying: Sequence[frozenset[Hashable]], num_workers: int, count: Any
) -> StepPlan:
    """The plan for a tree of gradients.

    Args:
      settings: the settings of the transformation.
      tree: what one worker holds, arrays or their shapes.
      varying: for each leaf the axes that it varies over.
      num_workers: N.
      count: the step; may be traced.
    """
    leaves = jax.tree.leaves(tree)
    is_protected = protected_leaves(tree, settings.protect)
    treated = treatments(tree, is_protected, settings.min_size)
    plans = settings.compressor.plan_leaves(tree, num_workers, count)
    keys = {i: (group_key(leaves[i], varying[i]), plans[i].bucket_key) for i in indices_of(treated, "compressed")}
    buckets = make_buckets(leaves, keys, settings.bucket_bytes)
    return StepPlan(treated, settings.protect is not None and not any(is_protected), plans, buckets)
