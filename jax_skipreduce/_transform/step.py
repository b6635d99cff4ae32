"""The settings of a reduction, and one step of it: gradients of this worker -> their mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_skipreduce._backends.ffi import Backend, check_backend
from jax_skipreduce._backends.ppermute import Normalize, Ring, check_normalize, num_steps_skipped
from jax_skipreduce._collectives.hierarchy import reduce_hierarchically
from jax_skipreduce._gradients import local as _local
from jax_skipreduce._gradients import shift as _shift
from jax_skipreduce._gradients.buckets import group_of, make_buckets, reduce_in_full
from jax_skipreduce._gradients.ratio import SkipRatios, check_ratios, num_steps_of, ratio_at, ratios_of_leaves
from jax_skipreduce._gradients.selection import Protect, indices_of, protected_leaves, treatments
from jax_skipreduce._workers import axes as _axes
from jax_skipreduce._workers.axes import AxisName
from jax_skipreduce._workers.wire import check_wire_dtype

TransformMode = Literal["random", "static", "dropout"]


@dataclasses.dataclass(frozen=True)
class Config:
    """The arguments of `skipreduce`, checked."""

    axis_name: AxisName
    skip_ratio: SkipRatios = 0.5
    mode: TransformMode = "random"
    normalize: Normalize = "skip"
    protect: Protect = None
    min_size: int = 1024
    bucket_bytes: int = 25 * 2**20
    seed: int = 0
    wire_dtype: Any = None
    backend: Backend = "auto"
    fast_axes: Any = ()
    check_every: int | None = None

    def __post_init__(self) -> None:
        slow = _axes.axis_names(self.axis_name)
        fast = _axes.axis_names(self.fast_axes) if self.fast_axes != () else ()
        object.__setattr__(self, "fast_axes", fast)
        if both := sorted(map(str, set(slow) & set(fast))):
            raise ValueError(
                f"fast_axes={fast}: {', '.join(both)} is in axis_name={self.axis_name!r}, too. An axis is either "
                "reduced in full (fast_axes) or with skipping (axis_name)"
            )
        check_ratios(self.skip_ratio)
        if self.mode not in ("random", "static", "dropout"):
            raise ValueError(f"mode={self.mode!r}: expected 'random', 'static' or 'dropout'")
        check_normalize(self.normalize, allow_none=False)
        object.__setattr__(self, "wire_dtype", check_wire_dtype(self.wire_dtype))
        check_backend(self.backend)
        # A seed is 32 bits, and a larger one would be another one's double.
        for name, least, most in (
            ("min_size", 0, None),
            ("bucket_bytes", 1, None),
            ("seed", 0, 2**32 - 1),
            ("check_every", 1, None),
        ):
            value = getattr(self, name)
            if value is None and name == "check_every":
                continue
            if isinstance(value, (Tracer, jax.Array)):
                raise TypeError(
                    f"{name} is an array: expected an int. Under optax.inject_hyperparams, name it in static_args"
                )
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected an int")
            if value < least or (most is not None and value > most):
                raise ValueError(f"{name}={value}: expected {least} or more" + (f", up to {most}" if most else ""))

    @property
    def all_axes(self) -> tuple[Any, ...]:
        """The axes that data is parallel over: those with skipping, then those without."""
        return (*_axes.axis_names(self.axis_name), *self.fast_axes)  # a tuple since __post_init__

    @property
    def is_dropout(self) -> bool:
        """Whether single elements are left out, and no step is."""
        return self.mode == "dropout"


def reduce_gradients(config: Config, ring: Ring, grads: Any, count: jax.Array) -> Any:
    """The gradients of this worker -> their mean over the workers, as `config` says for step `count`."""
    ring = dataclasses.replace(ring, wire_dtype=config.wire_dtype)
    leaves, treedef = jax.tree.flatten(grads)
    treated = treatments(grads, protected_leaves(grads, config.protect), config.min_size)
    fast = _axes.bound_axes(config.fast_axes) if config.fast_axes else ()
    everybody = ring.over(_axes.bound_axes(config.all_axes))
    _local.check_local(grads, everybody)

    in_full = indices_of(treated, "protected", "integer", "small")
    means = reduce_in_full([leaves[i] for i in in_full], everybody)
    # Without elements there is nothing to send, but the result has to be typed as the same on all workers.
    reduced = [
        leaf if leaf.size or leaf.dtype == jax.dtypes.float0 else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves
    ]
    for index, mean in zip(in_full, means, strict=True):
        reduced[index] = mean

    skipped = indices_of(treated, "skipped")
    steps, keys = steps_of_leaves(config, grads, ring.size, count)
    groups = {i: (group_of(leaves[i], _axes.varying_axes(leaves[i])), keys[i]) for i in skipped}
    buckets = make_buckets(leaves, groups, config.bucket_bytes)
    of_buckets = [num_steps_skipped("skip_ratio", steps[bucket[0]], ring) for bucket in buckets]
    shifts = _shifts(config, count, ring, of_buckets)
    masks = _shift.step_keys(config.seed, count, len(buckets)) if config.is_dropout else None
    for number, bucket in enumerate(buckets):
        means = reduce_hierarchically(
            [leaves[i] for i in bucket],
            ring,
            fast,
            num_skipped=of_buckets[number],
            shift=shifts[number],
            normalize=config.normalize,
            mode="dropout" if config.is_dropout else "skip",
            key=None if masks is None else masks[number],
            backend=config.backend,
            in_place=True,  # gradients: what comes next takes their mean
        )
        for index, mean in zip(bucket, means, strict=True):
            reduced[index] = mean
    return jax.tree.unflatten(treedef, reduced)


def steps_of_leaves(config: Config, tree: Any, num_workers: int, count: Any) -> tuple[list[int | jax.Array], list[Any]]:
    """The number of steps k that each leaf of `tree` skips, in order, and what leaves of one bucket have in common.

    That is k where it is a number. Where it is a schedule, one program serves all k of it, so it is the schedule.
    """
    ratios = ratios_of_leaves(config.skip_ratio, tree)
    known: dict[int, int | jax.Array] = {}
    for ratio in ratios:
        if id(ratio) not in known:
            known[id(ratio)] = num_steps_of(ratio_at(ratio, count), num_workers)
    steps = [known[id(ratio)] for ratio in ratios]
    keys: list[Any] = []
    for k, ratio in zip(steps, ratios, strict=True):
        is_number = not callable(ratio) and not isinstance(ratio, Tracer)
        keys.append(k if is_number else ("schedule", id(ratio)))
    return steps, keys


def _shifts(config: Config, count: jax.Array, ring: Ring, steps: Sequence[int | jax.Array]) -> list[Any]:
    """The shift of each bucket."""
    if all(isinstance(k, int) and k == 0 for k in steps):
        drawn: Any = None
    elif config.mode == "static":
        drawn = [0] * len(steps)
    else:
        # Dropout too, other than in Algorithm 1: the first worker of a chain always contributes, and without a
        # shift it would be the same one for ever.
        drawn = _shift.random_shifts(config.seed, count, len(steps), ring.size)
    # Where nothing is skipped, nothing needs to move: worker r owns slice r, and no row is rotated.
    return [-1 if isinstance(k, int) and k == 0 else drawn[number] for number, k in enumerate(steps)]
