"""skipreduce(): the optax transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jax_skipreduce._backends.ffi import Backend
from jax_skipreduce._backends.ppermute import Normalize
from jax_skipreduce._gradients.ratio import SkipRatios
from jax_skipreduce._gradients.selection import Protect
from jax_skipreduce._transform import sharded as _sharded
from jax_skipreduce._transform.configuration import check_configuration
from jax_skipreduce._transform.step import Config, TransformMode
from jax_skipreduce._workers import axes as _axes
from jax_skipreduce._workers.axes import AxisName


class SkipReduceState(NamedTuple):
    """State of `skipreduce`: the step counter, and the only thing to checkpoint.

    Attributes:
      count: int32 scalar, steps made; the same on all workers. It stays at the largest int32.
    """

    count: Any  # jax.Array; the name hides tuple.count, as in optax's own states


class SkipReduce(optax.GradientTransformation):
    """What `skipreduce` returns: an optax transformation that knows its settings (for `describe`)."""

    config: Config
    mesh: Any
    param_specs: Any


def skipreduce(
    axis_name: AxisName,
    skip_ratio: SkipRatios = 0.5,
    *,
    mode: TransformMode = "random",
    normalize: Normalize = "skip",
    protect: Protect = None,
    min_size: int = 1024,
    bucket_bytes: int = 25 * 2**20,
    seed: int = 0,
    wire_dtype: jax.typing.DTypeLike | None = None,
    backend: Backend = "auto",
    fast_axes: AxisName = (),
    check_every: int | None = None,
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
    has the table. The item is one of `wire_dtype`, where that is narrower.

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
        recompilation (what it gives is checked at some steps when the step is traced, and clamped at
        all others). k is rounded half to even: half of 3 workers are 2, a quarter of 2 are none. For
        ratios by layer: a pytree of such numbers and schedules (or a prefix), or a function of (path, leaf)
        that gives one. Leaves of one k, or of one and the same schedule, share buckets; else more are sent.
      mode: ``"random"`` moves the skipped slices every step. ``"static"`` does not: it biases
        training as soon as workers see different data. ``"dropout"`` (Algorithm 1, at random shifts)
        skips single elements with probability k/N, except for the first worker of each slice, and
        saves nothing on the wire: a yardstick.
      normalize: ``"skip"`` divides by N, so that what was skipped counts as zero. ``"drop"`` divides
        by the number of contributors, N-k, and is unbiased over the shifts. Where `skip_ratio` is a
        schedule, "drop" keeps the size of gradients, which Adam remembers, as it is.
      protect: leaves to reduce in full: a pytree of bools (or a prefix), or a function of (path,
        leaf) such as `by_path`.
      min_size: leaves with fewer elements are reduced in full.
      bucket_bytes: size up to which leaves are joined into one collective.
      seed: from which, with the counter, the shifts are drawn, 0..2**32-1. The same on all workers.
      wire_dtype: floats that are wider are rounded to it for the wire, and added up as they are: float32
        gradients with ``"bfloat16"`` send half the bytes, and come out as float32 values that bfloat16
        can hold. None sends them as they are. What is reduced in full is not rounded.
      backend: ``"auto"``, ``"xla"`` or ``"native"``: which way slices travel, see `all_reduce`.
      fast_axes: a mesh axis or a tuple of them, of a fast network, with `axis_name` that of a slow one: GPUs of
        a node and nodes, or TPU chips and slices. Gradients are then local to all of these axes. They are
        reduced in full over the fast ones, so that each of their M workers has 1/M of them to send over the
        slow ones, where steps are skipped and N is counted; then gathered over the fast ones. 16-bit floats
        are added up in float32 there, too.
      check_every: in every step that is a multiple of this, parameters are compared over the workers, and an error
        names worker and leaf if they differ (`check_replicas`). None: never. With it, `update` needs `params`,
        and all mesh axes have to be manual (or `mesh` given).
      mesh: for pjit programs: the mesh. `update` then needs `params`.
      param_specs: the `PartitionSpec` of each parameter (a pytree, or a prefix of it) over axes that
        are not manual: with `mesh`, or in a `shard_map` over some of the axes. Shards are then reduced
        by themselves. None: as the types of the gradients say where those axes are Explicit; Auto
        axes, of which types say nothing, count as not sharded over, and then gradients are gathered.

    Returns:
      An `optax.GradientTransformation` with state `SkipReduceState`. The state does not depend on
      the number of workers, so it can be restored at another one.

    Raises:
      ValueError, TypeError: an argument is out of range (at once); gradients are reduced already, a
        mask does not match, an axis is not bound, a leaf has a dtype that cannot be reduced, k or
        the counter differ between workers, or processes have other settings or trees (when the step
        is traced).

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
    config = Config(
        axis_name=axis_name,
        skip_ratio=skip_ratio,
        mode=mode,
        normalize=normalize,
        protect=protect,
        min_size=min_size,
        bucket_bytes=bucket_bytes,
        seed=seed,
        wire_dtype=wire_dtype,
        backend=backend,
        fast_axes=fast_axes,
        check_every=check_every,
    )
    if mesh is not None:
        missing = [name for name in config.all_axes if name not in mesh.axis_names]
        if missing:
            given = f"axis_name={axis_name!r}" + (f", fast_axes={fast_axes!r}" if config.fast_axes else "")
            raise ValueError(f"{given}: the mesh has no axis {missing}, only {mesh.axis_names}")

    def init(params: optax.Params) -> SkipReduceState:
        del params
        return SkipReduceState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SkipReduceState]:
        check_configuration(config, mesh, updates)
        if config.check_every:
            _sharded.check_parameters(config, mesh, param_specs, params, state.count)
        if mesh is None:
            _check_count(state.count, config.all_axes)
            reduced = _sharded.reduce_local(config, param_specs, updates, state.count)
        else:
            reduced = _sharded.reduce_stacked(config, mesh, param_specs, updates, state.count, params)
        return reduced, SkipReduceState(optax.safe_increment(state.count))

    transformation = SkipReduce(init, update)
    transformation.config = config
    transformation.mesh = mesh
    transformation.param_specs = param_specs
    return transformation


def _check_count(count: jax.Array, axis_name: AxisName) -> None:
    varying = _axes.varying_axes(count) & set(_axes.axis_names(axis_name))
    if varying:
        raise ValueError(
            f"the step counter of skipreduce varies over {', '.join(sorted(map(str, varying)))}: workers with "
            "different counters would wait for each other for ever. Pass opt_state with in_specs P() through "
            "jax.shard_map"
        )
