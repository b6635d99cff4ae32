"""Skipping: a reduction that leaves out part of its reduce-scatter steps, at positions that move every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_skipreduce._backends.choice import chosen_backend, reduce_arrays
from jax_skipreduce._backends.reduction import Backend, Reduction, check_backend
from jax_skipreduce._gradients.ratio import (
    SkipRatios,
    check_ratios,
    is_of_each,
    num_steps_of,
    ratio_at,
    ratios_of_leaves,
    schedule_text,
)
from jax_skipreduce._gradients.shift import random_shifts, step_keys
from jax_skipreduce._topologies.ring import RING
from jax_skipreduce._topologies.topology import Topology
from jax_skipreduce._transform.compressor import Compressor, LeafForecast, LeafPlan, StepForecast
from jax_skipreduce._workers.arguments import checked_count
from jax_skipreduce._workers.blocks import slice_size
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.mean import Normalize, check_normalize
from jax_skipreduce._workers.ranges import check_int
from jax_skipreduce._workers.wire import AS_THEY_ARE, Wire

TransformMode = Literal["random", "static", "dropout"]


@dataclasses.dataclass(frozen=True)
class Skip(Compressor):
    """Leaves out k of the N-1 reduce-scatter steps. The fields are arguments of `skipreduce`."""

    name: ClassVar[str] = "skipreduce"
    treatment: ClassVar[str] = "skipped"

    skip_ratio: SkipRatios = 0.5
    mode: TransformMode = "random"
    normalize: Normalize = "skip"
    seed: int = 0
    wire: Wire = AS_THEY_ARE
    backend: Backend = "auto"
    topology: Topology = RING

    def __post_init__(self) -> None:
        check_ratios(self.skip_ratio)
        if self.mode not in ("random", "static", "dropout"):
            raise ValueError(f"mode={self.mode!r}: expected 'random', 'static' or 'dropout'")
        check_normalize(self.normalize, allow_none=False)
        check_backend(self.backend)
        # A seed has 32 bits, so a larger seed would give the shifts of a smaller one.
        check_int("seed", self.seed, 0, 2**32 - 1)

    @property
    def _is_dropout(self) -> bool:
        """Whether single elements are left out instead of steps."""
        return self.mode == "dropout"

    def plan_leaves(self, tree: Any, num_workers: int, count: Any) -> list[LeafPlan]:
        """The k of each leaf. The bucket key is k if k is static, else the schedule itself."""
        ratios = ratios_of_leaves(self.skip_ratio, tree)
        # One program serves all k of a schedule.
        known: dict[int, int | jax.Array] = {}
        for ratio in ratios:
            if id(ratio) not in known:
                known[id(ratio)] = num_steps_of(ratio_at(ratio, count), num_workers)
        plans = []
        for ratio in ratios:
            k = known[id(ratio)]
            is_number = isinstance(k, int) and not callable(ratio)
            plans.append(LeafPlan(k if is_number else ("schedule", id(ratio)), k))
        return plans

    def plan_buckets(self, values: Sequence[Any], group: Group, count: Any) -> list[Any]:
        """The reduction of each bucket."""
        most = self.topology.max_skipped(group.size)
        steps = [checked_count("skip_ratio", k, group, most) for k in values]
        shifts = self._shifts(steps, group, count)
        masks = step_keys(self.seed, count, len(steps)) if self._is_dropout else None
        return [
            Reduction(
                num_skipped=k,
                shift=shifts[number],
                normalize=self.normalize,
                mode="dropout" if self._is_dropout else "skip",
                key=None if masks is None else masks[number],
                wire=self.wire,
                topology=self.topology,
                backend=self.backend,
                in_place=True,  # nobody needs the local gradients after the reduction
            )
            for number, k in enumerate(steps)
        ]

    def _shifts(self, steps: Sequence[int | jax.Array], group: Group, count: Any) -> list[Any]:
        """The shift of each bucket."""
        if all(isinstance(k, int) and k == 0 for k in steps):
            drawn: Any = None
        elif self.mode == "static":
            drawn = [0] * len(steps)
        else:
            # Unlike Algorithm 1, dropout is shifted too; otherwise one worker would always contribute.
            drawn = random_shifts(self.seed, count, len(steps), group.size)
        # Where nothing is skipped, nothing needs to move: worker r owns slice r, and no row is rotated.
        return [-1 if isinstance(k, int) and k == 0 else drawn[number] for number, k in enumerate(steps)]

    def reduce(
        self, bucket: Sequence[jax.Array], states: Sequence[Any], plan: Any, group: Group
    ) -> tuple[Sequence[jax.Array], Sequence[Any]]:
        """The all-reduce of `topology` with skipping."""
        return reduce_arrays(bucket, group, plan), states

    def forecast(self, tree: Any, num_workers: int, num_parts: int, count: int) -> StepForecast:
        """Bytes and steps, counted from the schedule of the topology."""
        plans = self.plan_leaves(tree, num_workers, jnp.int32(count))
        leaves = tuple(
            self._forecast_leaf(leaf, int(plan.value), num_workers, num_parts)
            for leaf, plan in zip(jax.tree.leaves(tree), plans, strict=True)
        )
        by_leaf = is_of_each(self.skip_ratio)
        ratios = ratios_of_leaves(self.skip_ratio, tree) if by_leaf else [self.skip_ratio]
        # A ratio for all is known even if there are no leaves.
        of_all = None if by_leaf else float(ratio_at(self.skip_ratio, jnp.int32(count)))
        return StepForecast(
            leaves,
            skip_ratio=of_all,
            num_skipped=max((leaf.num_skipped for leaf in leaves), default=0)
            if of_all is None
            else int(num_steps_of(of_all, num_workers)),
            has_schedule=any(map(callable, ratios)),
        )

    def _forecast_leaf(self, leaf: Any, k: int, num_workers: int, num_parts: int) -> LeafForecast:
        k = min(k, self.topology.max_skipped(num_workers))
        on_the_wire = 0 if self._is_dropout else k
        left_out = leaf.size * k / num_workers
        if self._is_dropout:
            left_out *= (num_workers - 1) / num_workers  # the first worker of a chain always contributes
        elements = slice_size(slice_size(leaf.size, num_parts), num_workers)
        num_bytes = self.topology.slices_sent(num_workers, on_the_wire) * self.wire.num_bytes(elements, leaf.dtype)
        return LeafForecast(str(self.wire.sent_as(leaf.dtype)), num_bytes, left_out, on_the_wire)

    def headline(self, forecast: StepForecast, num_workers: int, when: str) -> str:
        """The ratio, and the number of steps that it skips."""
        ratio = "by leaf" if forecast.skip_ratio is None else f"{forecast.skip_ratio:g}"
        least = min((leaf.num_skipped for leaf in forecast.leaves), default=forecast.num_skipped)
        steps = f"{least} to {forecast.num_skipped}" if least != forecast.num_skipped else f"{forecast.num_skipped}"
        return f"skip_ratio {ratio}{when}: {steps} of {num_workers - 1} reduce-scatter steps skipped"

    def fingerprint(self, tree: Any) -> tuple[dict[str, str], list[str]]:
        """The fields, and the ratio of each leaf. A function counts by what it returns."""
        of_all, _ = super().fingerprint(tree)
        del of_all["skip_ratio"]
        of_all["wire_dtype"] = of_all.pop("wire")  # as users call it
        of_all["backend"] = chosen_backend(self.backend)
        ratios = ratios_of_leaves(self.skip_ratio, tree)
        shown = {id(ratio): ratio for ratio in ratios}
        shown = {key: f"skip_ratio {_shown(ratio)}" for key, ratio in shown.items()}
        return of_all, [shown[id(ratio)] for ratio in ratios]


def _shown(ratio: Any) -> str:
    if isinstance(ratio, Tracer):
        return "traced"
    return schedule_text(ratio) if callable(ratio) else f"{float(ratio):g}"
