"""skipreduce(): the optax transformation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from jax_skipreduce import _axes, _local, _shift
from jax_skipreduce._axes import AxisName
from jax_skipreduce._buckets import make_buckets, reduce_bucket, reduce_in_full
from jax_skipreduce._collectives import Normalize, Ring, check_normalize, num_steps_skipped
from jax_skipreduce._selection import Protect, indices_of, treatments

SkipRatio = float | Callable[[Any], Any]
TransformMode = Literal["random", "static", "dropout"]

# Steps at which a schedule's ratio is looked at when the training step is traced.
_PROBED_COUNTS = (0, 1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)


class SkipReduceState(NamedTuple):
    """State of `skipreduce`: the step counter, and the only thing to checkpoint.

    Attributes:
      count: int32 scalar, steps made; the same on all workers. It stays at the largest int32.
    """

    count: Any  # jax.Array; the name hides tuple.count, as in optax's own states


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


class SkipReduce(optax.GradientTransformation):
    """What `skipreduce` returns: an optax transformation that knows its settings (for `describe`)."""

    config: Config
    mesh: Any
    param_specs: Any


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


def skipreduce(
    axis_name: AxisName,
    skip_ratio: SkipRatio = 0.5,
    *,
    mode: TransformMode = "random",
    normalize: Normalize = "skip",
    protect: Protect = None,
    min_size: int = 1024,
    bucket_bytes: int = 25 * 2**20,
    seed: int = 0,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    param_specs: Any = None,
) -> optax.GradientTransformation:
    """Averages gradients over the workers of `axis_name`, leaving out part of the reduce-scatter.

    Takes the place of ``lax.pmean(grads, axis_name)``; put it first in the chain:
    ``optax.chain(sr.skipreduce("data", 0.5), optax.adam(1e-3))``. What goes in are local gradients
    (`local_value_and_grad`), what comes out is the same on all workers, bit for bit.

    Leaves are padded, cut in N slices each and joined in buckets. In every step, each worker's
    gradient is left out of k of the N slices of each leaf, where k = round(skip_ratio * N); which
    ones is drawn anew for each step and bucket. Bytes on the wire per worker for a leaf of n
    elements: (2(N-1) - k) * ceil(n/N) * itemsize, against 2(N-1) * ceil(n/N) * itemsize; `describe`
    has the table.

    Reduced in full, as `lax.pmean` does it and in one call, are leaves that `protect` names, leaves
    under `min_size` elements, and integer and bool leaves (which come as floats, as from
    `lax.pmean`). Empty leaves and the float0 gradients of integers pass as they are, and so does
    None.

    **In jax.shard_map** (also `pmap`, and `vmap` as a simulation of workers on one device) call
    ``update`` inside, with the axis bound. **In pjit programs** give `mesh`: gradients then come
    stacked on a leading axis of size N, one row per worker, sharded over `axis_name` (for example
    from ``jax.vmap(jax.grad(loss), in_axes=(None, 0), spmd_axis_name=axis_name)``); the reduction
    runs in a `shard_map` of its own over all axes of the mesh, and tensor-parallel parameters stay
    sharded.

    Args:
      axis_name: the data-parallel mesh axis, or a tuple of them in any order.
      skip_ratio: share of the gradient that each worker leaves out: a number in [0, 1), which gives
        a static k, or an optax schedule of the step counter, which gives a traced k without
        recompilation (the ratios that it gives are checked at some steps, and clamped at all).
      mode: ``"random"`` moves the skipped slices every step. ``"static"`` does not: it biases
        training as soon as workers see different data. ``"dropout"`` (Algorithm 1) skips single
        elements with probability k/N and saves nothing on the wire: a yardstick.
      normalize: ``"skip"`` divides by N, so that what was skipped counts as zero. ``"drop"`` divides
        by the number of contributors, N-k, and is unbiased over the shifts.
      protect: leaves to reduce in full: a pytree of bools (or a prefix), or a function of (path,
        leaf) such as `by_path`.
      min_size: leaves with fewer elements are reduced in full.
      bucket_bytes: size up to which leaves are joined into one collective.
      seed: from which, with the counter, the shifts are drawn. The same on all workers.
      mesh: for pjit programs: the mesh.
      param_specs: with `mesh`: the `PartitionSpec` of each parameter (a pytree, or a prefix of it).
        None: as the types of the gradients say where mesh axes are Explicit; over Auto axes, of
        which types say nothing, replicated. `update` then needs `params`.

    Returns:
      An `optax.GradientTransformation` with state `SkipReduceState`. The state does not depend on
      the number of workers, so it can be restored at another one.

    Raises:
      ValueError, TypeError: an argument is out of range (at once); gradients are reduced already, a
        mask does not match, an axis is not bound, a leaf has a dtype that cannot be reduced, k or
        the counter differ between workers (when the step is traced).

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_skipreduce as sr
      >>> tx = optax.chain(sr.skipreduce("data", 0.5, min_size=1), optax.sgd(1.0))
      >>> state = tx.init(jnp.zeros(4))
      >>> grads = jnp.ones((4, 4))  # of four simulated workers
      >>> jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data")(grads)[0]
      Array([-0.5, -0.5, -0.5, -0.5], dtype=float32)

    References:
      SkipReduce, MICRO 2025: sections 4.3 (random), 4.4 (selective).
    """
    config = Config(axis_name, skip_ratio, mode, normalize, protect, min_size, bucket_bytes, seed)
    if mesh is None and param_specs is not None:
        raise ValueError("param_specs is for pjit programs: give mesh= too, or leave it out inside jax.shard_map")
    if mesh is not None:
        missing = [name for name in _axes.axis_names(axis_name) if name not in mesh.axis_names]
        if missing:
            raise ValueError(f"axis_name={axis_name!r}: the mesh has no axis {missing}, only {mesh.axis_names}")

    def init(params: optax.Params) -> SkipReduceState:
        del params
        return SkipReduceState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SkipReduceState]:
        if mesh is None:
            _check_count(state.count, config.axis_name)
            reduced = reduce_gradients(config, updates, state.count)
        else:
            from jax_skipreduce import _stacked

            reduced = _stacked.reduce_stacked(config, mesh, param_specs, updates, state.count, params)
        return reduced, SkipReduceState(optax.safe_increment(state.count))

    transformation = SkipReduce(init, update)
    transformation.config = config
    transformation.mesh = mesh
    transformation.param_specs = param_specs
    return transformation


def _check_count(count: jax.Array, axis_name: AxisName) -> None:
    varying = _axes.varying_axes(count) & set(_axes.bound_axes(axis_name))
    if varying:
        raise ValueError(
            f"the step counter of skipreduce varies over {', '.join(sorted(map(str, varying)))}: workers with "
            "different counters would wait for each other for ever. Pass opt_state with in_specs P() through "
            "jax.shard_map"
        )
