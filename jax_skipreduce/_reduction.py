"""The settings of a reduction, and one step of it: gradients of this worker -> their mean."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_skipreduce import _axes, _local, _shift
from jax_skipreduce._axes import AxisName
from jax_skipreduce._buckets import make_buckets, reduce_bucket, reduce_in_full
from jax_skipreduce._execute import Normalize, Ring, check_normalize, num_steps_skipped
from jax_skipreduce._selection import Protect, indices_of, treatments

SkipRatio = float | Callable[[Any], Any]
TransformMode = Literal["random", "static", "dropout"]

# Steps at which a schedule's ratio is looked at when the training step is traced.
_PROBED_COUNTS = (0, 1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)


@dataclasses.dataclass(frozen=True)
class Config:
    """The arguments of `skipreduce`, checked."""

    axis_name: AxisName
    skip_ratio: SkipRatio = 0.5
    mode: TransformMode = "random"
    normalize: Normalize = "skip"
    protect: Protect = None
    min_size: int = 1024
    bucket_bytes: int = 25 * 2**20
    seed: int = 0

    def __post_init__(self) -> None:
        _axes.axis_names(self.axis_name)
        if not callable(self.skip_ratio):
            _check_ratio(self.skip_ratio)
        if self.mode not in ("random", "static", "dropout"):
            raise ValueError(f"mode={self.mode!r}: expected 'random', 'static' or 'dropout'")
        check_normalize(self.normalize, allow_none=False)
        for name, least in (("min_size", 0), ("bucket_bytes", 1), ("seed", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected an int")
            if value < least:
                raise ValueError(f"{name}={value}: expected at least {least}")

    def num_skipped(self, num_workers: int, count: Any) -> int | jax.Array:
        """K in step `count`: round(skip_ratio * N), at most N-1. An int where the ratio is a number."""
        if not callable(self.skip_ratio):
            return num_skipped(self.skip_ratio, num_workers)
        # A schedule is a function of the counter alone, so it can be looked at before it runs; without
        # the mesh that is set where this is traced, whose axes may be manual here.
        no_mesh = jax.sharding.AbstractMesh((), ())
        with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(no_mesh):
            for probed in _PROBED_COUNTS:
                _check_ratio(self.skip_ratio(jnp.int32(probed)), f" at step {probed}")
        ratio = self.skip_ratio(count)
        if not isinstance(ratio, Tracer):
            return num_skipped(ratio, num_workers)
        return jnp.clip(jnp.round(ratio.astype(jnp.float32) * num_workers), 0, num_workers - 1).astype(jnp.int32)


def _check_ratio(ratio: Any, where: str = "") -> None:
    """Raises TypeError or ValueError if `ratio` is no number in [0, 1)."""
    expected = "expected a number in [0, 1): the share of its gradients that each worker leaves out"
    try:
        value = float(ratio)
    except (TypeError, ValueError):
        raise TypeError(f"skip_ratio={ratio!r}{where}: {expected}, or an optax schedule that gives one") from None
    if isinstance(ratio, bool):
        raise TypeError(f"skip_ratio={ratio}{where}: {expected}")
    if not 0 <= value < 1:  # neither is NaN
        raise ValueError(f"skip_ratio={value}{where}: {expected}")


def num_skipped(ratio: Any, num_workers: int) -> int:
    """K = round(ratio * N), at most N-1. In float32, as for a traced ratio, so that both round alike."""
    return min(int(np.round(np.float32(ratio) * np.float32(num_workers))), num_workers - 1)


def reduce_gradients(config: Config, grads: Any, count: jax.Array) -> Any:
    """The gradients of this worker -> their mean over the workers, as `config` says for step `count`."""
    ring = Ring.of(config.axis_name)
    leaves, treedef = jax.tree.flatten(grads)
    treated = treatments(grads, config.protect, config.min_size)
    _local.check_local(grads, config.axis_name)

    in_full = indices_of(treated, "protected", "integer")
    small = indices_of(treated, "small")
    means = reduce_in_full([leaves[i] for i in in_full], [leaves[i] for i in small], ring)
    # Without elements there is nothing to send, but the result has to be typed as the same on all workers.
    reduced = [
        leaf if leaf.size or leaf.dtype == jax.dtypes.float0 else jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves
    ]
    for index, mean in zip([*in_full, *small], means, strict=True):
        reduced[index] = mean

    buckets = make_buckets(leaves, indices_of(treated, "skipped"), config.bucket_bytes)
    steps_skipped = num_steps_skipped("skip_ratio", config.num_skipped(ring.size, count), ring)
    shifts = _shifts(config, count, len(buckets), ring, steps_skipped)
    keys = _shift.step_keys(config.seed, count, len(buckets)) if config.mode == "dropout" else None
    for number, bucket in enumerate(buckets):
        means = reduce_bucket(
            [leaves[i] for i in bucket],
            ring,
            num_skipped=steps_skipped,
            shift=shifts[number],
            normalize=config.normalize,
            mode="dropout" if config.mode == "dropout" else "skip",
            key=None if keys is None else keys[number],
        )
        for index, mean in zip(bucket, means, strict=True):
            reduced[index] = mean
    return jax.tree.unflatten(treedef, reduced)


def _shifts(config: Config, count: jax.Array, num_buckets: int, ring: Ring, steps_skipped: Any) -> Any:
    """The shift of each bucket."""
    if isinstance(steps_skipped, int) and steps_skipped == 0:
        # Nothing is skipped, so nothing needs to move: worker r owns slice r, and no row is rotated.
        return [-1] * num_buckets
    if config.mode == "random" and num_buckets:
        return _shift.random_shifts(config.seed, count, num_buckets, ring.size)
    return [0] * num_buckets
