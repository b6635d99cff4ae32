"""skipreduce(): skipping as an optax transformation, and its settings as an object."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import optax

from jax_skipreduce._backends.reduction import Backend
from jax_skipreduce._compressors.skip import Skip, TransformMode
from jax_skipreduce._forecast.method import Method
from jax_skipreduce._gradients.ratio import SkipRatios
from jax_skipreduce._gradients.selection import Protect
from jax_skipreduce._transform.registry import register
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._workers.axes import AxisName
from jax_skipreduce._workers.mean import Normalize
from jax_skipreduce._workers.renamed import renamed
from jax_skipreduce._workers.wire import Wire


@register
@dataclasses.dataclass(frozen=True)
class SkipReduce(Method):
    """The settings of `skipreduce` as an object, which keeps them when the transformation is in a chain.

    `SkipReduce` takes the arguments of `skipreduce`. ``SkipReduce(..).transform()`` is ``skipreduce(..)``. The method
    `describe` tells what the transformation will do before a run, the method `metrics` what it does during one.
    `resize_state` changes the state of a checkpoint for another number of workers.

    Raises:
      ValueError, TypeError: an argument is out of range.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jax_skipreduce as sr
      >>> method = sr.SkipReduce("data", 0.5)
      >>> tx = optax.chain(method.transform(), optax.adam(1e-3))
      >>> params = {"kernel": jnp.zeros((784, 128))}
      >>> method.describe(params, num_workers=8).num_skipped
      4
      >>> method.metrics(tx.init(params), params, num_workers=8)["skipreduce/bytes_saved"]
      200704
    """

    name: ClassVar[str] = Skip.name

    axis_name: AxisName
    skip_ratio: SkipRatios = 0.5
    _: dataclasses.KW_ONLY
    mode: TransformMode = "random"
    normalize: Normalize = "skip"
    protect: Protect = None
    min_size: int = 1024
    bucket_bytes: int = 25 * 2**20
    seed: int = 0
    wire_dtype: jax.typing.DTypeLike | None = None
    backend: Backend = "auto"
    fast_axes: AxisName = ()
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
    param_specs: Any = None

    def __post_init__(self) -> None:
        _ = self.settings  # checks them

    @property
    def settings(self) -> Settings:
        """The settings that all transformations have, with skipping as the compressor."""
        skip = Skip(self.skip_ratio, self.mode, self.normalize, self.seed, Wire.of(self.wire_dtype), self.backend)
        return Settings(
            axis_name=self.axis_name,
            compressor=skip,
            protect=self.protect,
            min_size=self.min_size,
            bucket_bytes=self.bucket_bytes,
            fast_axes=self.fast_axes,
            mesh=self.mesh,
            param_specs=self.param_specs,
        )


@renamed(check_every="chain sr.check_every(num_steps, axis_name) behind the optimizer")
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
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    param_specs: Any = None,
) -> optax.GradientTransformation:
    """Averages gradients over the workers of `axis_name`, leaving out part of the reduce-scatter.

    The transformation takes the place of ``lax.pmean(grads, axis_name)``. Put it first in the chain:
    ``optax.chain(sr.skipreduce("data", 0.5), optax.adam(1e-3))``. It takes local gradients
    (`local_value_and_grad`), and gives means that are the same on all workers, bit for bit.

    Leaves are padded, cut in N slices each and joined in buckets. In every step, each worker's
    gradient is left out of k of the N slices of each leaf, where k = round(skip_ratio * N). The
    position of these k slices is drawn anew for each step and bucket. Bytes on the wire per worker for
    a leaf of n elements: (2(N-1) - k) * ceil(n/N) * itemsize, against 2(N-1) * ceil(n/N) * itemsize;
    `describe` has the table. itemsize is that of `wire_dtype` if it is narrower.

    Leaves that `protect` names, leaves under `min_size` elements, and integer and bool leaves are
    reduced in full, as by `lax.pmean` and in one call. (Integers and bools come as floats, as from
    `lax.pmean`.) Empty leaves, the float0 gradients of integers, and None pass as they are.

    **In jax.shard_map** (also `pmap`, and `vmap` as a simulation of workers on one device) call
    ``update`` inside, with the axis bound. **In pjit programs** give `mesh`: gradients then come
    stacked on a leading axis of size N, one row per worker, sharded over `axis_name` (for example
    from ``jax.vmap(jax.grad(loss), in_axes=(None, 0), spmd_axis_name=axis_name)``); the reduction
    runs in a `shard_map` of its own over all axes of the mesh, and tensor-parallel parameters stay
    sharded.

    To freeze parameters, leave them out of what is differentiated, or give zeros for their gradients before the chain:
    docs/sharp-bits.md has the recipe that sends nothing for them.

    `SkipReduce` holds the same settings as an object, which describes what the transformation does in any chain.

    Args:
      axis_name: the data-parallel mesh axis, or a tuple of them in any order.
      skip_ratio: share of the gradient that each worker leaves out: a number in [0, 1), which gives
        a static k, or an optax schedule of the step counter, which gives a traced k without
        recompilation (the ratio is checked at some steps when the step is traced, and clamped at
        all others). k is rounded half to even: half of 3 workers are 2, a quarter of 2 are none. For
        ratios by layer, give a pytree of numbers and schedules (or a prefix), or a function of (path, leaf)
        that returns a number or a schedule. Each distinct k or schedule gets buckets of its own.
      mode: ``"random"`` moves the skipped slices every step. ``"static"`` does not move them, which biases
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
      seed: 0..2**32-1, the same on all workers. Shifts are drawn from the seed and the step counter.
      wire_dtype: wider floats are rounded to this dtype for the wire, and added up in their own dtype. With
        ``"bfloat16"``, float32 gradients take half the bytes, and come out as float32 values that bfloat16
        can hold. With None, gradients are sent as they are. Leaves that are reduced in full are not rounded.
      backend: ``"auto"``, ``"xla"`` or ``"native"``: which way slices travel, see `all_reduce`.
      fast_axes: a mesh axis or a tuple of axes of a fast network, while `axis_name` is the axis of a slow network:
        GPUs of a node and nodes, or TPU chips and slices. Gradients are then local to all of these axes. They are
        reduced in full over the M workers of the fast axes, so that each of these workers sends 1/M of a gradient
        over the slow axes, where steps are skipped and N is counted. Then they are gathered over the fast axes.
        16-bit floats are added up in float32 there, too.
      mesh: for pjit programs: the mesh. `update` then needs `params`.
      param_specs: the `PartitionSpec` of each parameter (a pytree, or a prefix of it) over axes that
        are not manual: with `mesh`, or in a `shard_map` over some of the axes. Shards are then reduced
        by themselves. With None, the types of the gradients say how parameters are sharded over Explicit
        axes. Types say nothing about Auto axes: gradients that are sharded over Auto axes are gathered, and
        with `mesh` a warning says so.

    Returns:
      An `optax.GradientTransformation` with state `SkipReduceState`. The state does not depend on
      the number of workers, so it can be restored at another one.

    Raises:
      ValueError, TypeError: an argument is out of range (at once); gradients are reduced already, a
        mask does not match, an axis is not bound, a leaf has a dtype that cannot be reduced, k or
        the counter differ between workers, or processes have other settings or trees (when the step
        is traced).

    Warns:
      UserWarning: `protect` is a `by_path` that matches no leaf, or Auto axes without `param_specs` may cost
        all-gathers (when the step is traced).

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
    return SkipReduce(
        axis_name,
        skip_ratio,
        mode=mode,
        normalize=normalize,
        protect=protect,
        min_size=min_size,
        bucket_bytes=bucket_bytes,
        seed=seed,
        wire_dtype=wire_dtype,
        backend=backend,
        fast_axes=fast_axes,
        mesh=mesh,
        param_specs=param_specs,
    ).transform()
