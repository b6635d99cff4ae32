"""Which way an all-reduce goes: around the ring of ppermutes, or through the native kernels."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_skipreduce._backends import ffi as _ffi
from jax_skipreduce._backends.ffi import Backend
from jax_skipreduce._backends.ppermute import Mode, Normalize, Ring, from_block, reduce_blocks, to_block
from jax_skipreduce._workers import axes as _axes
from jax_skipreduce._workers import wire as _wire


def reduce_arrays(
    arrays: Sequence[jax.Array],
    ring: Ring,
    *,
    num_skipped: int | jax.Array = 0,
    shift: int | jax.Array = 0,
    normalize: Normalize | None = "skip",
    mode: Mode = "skip",
    key: jax.Array | None = None,
    num_gather_skipped: int | jax.Array = 0,
    backend: Backend = "auto",
    in_place: bool = False,
) -> list[jax.Array]:
    """All-reduces arrays of one dtype, each cut in N slices of its own. None of them is empty.

    Arguments are those of `all_reduce`, checked already. With `in_place`, the native call writes results where the
    arrays were: half the memory and half the time, if they are not needed any more.

    Raises:
      ValueError: ``backend="native"``, and the kernels cannot do this.
    """

    def around_the_ring(
        arrays: Sequence[jax.Array], ring: Ring, num_skipped: int | jax.Array, shift: int | jax.Array
    ) -> list[jax.Array]:
        blocks = reduce_blocks(
            [to_block(array, ring.size) for array in arrays],
            ring,
            num_skipped=num_skipped,
            shift=shift,
            normalize=normalize,
            mode=mode,
            key=key,
            num_gather_skipped=num_gather_skipped,
        )
        return [from_block(block, array.shape) for block, array in zip(blocks, arrays, strict=True)]

    backend = _ffi.chosen_backend(backend)
    if backend == "xla" or ring.size == 1:
        return around_the_ring(arrays, ring, num_skipped, shift)
    sent = _wire.sent_dtype(arrays[0].dtype, ring.wire_dtype)
    reasons = _reasons_against(arrays[0].dtype, sent, ring, num_skipped, mode, num_gather_skipped, backend)
    platforms = [platform for platform, reason in reasons.items() if reason is None]
    if not platforms:
        if backend == "native":
            told = "; ".join(dict.fromkeys(str(reason) for reason in reasons.values()))
            raise ValueError(f"backend='native': {told}. Use backend='auto' or 'xla'; sr.native_info() says more")
        return around_the_ring(arrays, ring, num_skipped, shift)
    other_axes = tuple(sorted(_varying([*arrays, num_skipped, shift]) - set(ring.names), key=str))
    wire_dtype = None if sent == arrays[0].dtype else sent

    def typed(means: Sequence[jax.Array]) -> list[jax.Array]:
        # Results of a custom call count as the same everywhere; over axes that are not reduced they are not.
        return [_axes.make_varying(mean, other_axes) if ring.tracked else mean for mean in means]

    def on_cpu(
        rank: jax.Array, group: jax.Array, num_skipped: jax.Array, shift: jax.Array, *arrays: jax.Array
    ) -> list[jax.Array]:
        means = _ffi.all_reduce_cpu(
            arrays,
            rank,
            group,
            num_skipped,
            shift,
            num_workers=ring.size,
            normalize=normalize,
            wire_dtype=wire_dtype,
            in_place=in_place,
        )
        return typed(means)

    def on_cuda(
        rank: jax.Array, group: jax.Array, steps: jax.Array, shift: jax.Array, *arrays: jax.Array
    ) -> list[jax.Array]:
        del rank, group, steps
        assert isinstance(num_skipped, int)  # _reasons_against sees to it
        blocks = [to_block(array, ring.size) for array in arrays]
        ends = list(itertools.accumulate(block.shape[1] for block in blocks))
        joined = jnp.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]
        # Rows of whole 16 bytes, which are moved as such.
        joined = jnp.pad(joined, ((0, 0), (0, -joined.shape[1] % 8)))
        reduced = _ffi.all_reduce_cuda(
            joined,
            shift,
            num_workers=ring.size,
            num_skipped=num_skipped,
            normalize=normalize,
            wire_dtype=wire_dtype,
            replica_groups=_groups(ring),
        )
        columns = jnp.split(reduced, ends, axis=1)[: len(arrays)]
        return typed([from_block(column, array.shape) for column, array in zip(columns, arrays, strict=True)])

    native: dict[str, Any] = {"cpu": on_cpu, "cuda": on_cuda}

    def by_ring(
        rank: jax.Array, group: jax.Array, steps: jax.Array, moved: jax.Array, *arrays: jax.Array
    ) -> list[jax.Array]:
        del group
        # Numbers that are known make a shorter program than the operands do.
        return around_the_ring(
            arrays,
            # Not the rank of the surrounding trace, which is over when the derivative of an inner function is taken.
            dataclasses.replace(ring, rank=rank),
            num_skipped if isinstance(num_skipped, int) else steps,
            shift if isinstance(shift, int) else moved,
        )

    @jax.custom_jvp
    def reduce(*operands: jax.Array) -> list[jax.Array]:
        # Decided where the program is lowered, so that one program can be exported for several platforms.
        branches: dict[str, Any] = {platform: native[platform] for platform in platforms}
        if backend == "auto":
            branches["default"] = by_ring
        return lax.platform_dependent(*operands, **branches)

    # An all-reduce is linear in the arrays. Tangents go around the ring, which JAX can transpose.
    @reduce.defjvp
    def reduce_jvp(
        primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        return reduce(*primals), by_ring(*primals[:4], *tangents[4:])

    scalars = (ring.rank, _group(ring), jnp.asarray(num_skipped, jnp.int32), jnp.asarray(shift, jnp.int32))
    return reduce(*scalars, *(ring.local(array) for array in arrays))


def _varying(values: Sequence[Any]) -> set[Hashable]:
    return {name for value in values for name in _axes.varying_axes(value)}


def _reasons_against(
    dtype: Any,
    sent: Any,
    ring: Ring,
    num_skipped: int | jax.Array,
    mode: Mode,
    num_gather_skipped: int | jax.Array,
    backend: Backend,
) -> dict[str, str | None]:
    """Why the kernels cannot do a reduction, by platform. None where they can."""
    reason = _reason_against(ring, mode, num_gather_skipped)
    if reason is not None:
        return {"cpu": reason, "cuda": reason}
    asked = backend == "native"
    reasons: dict[str, str | None] = {
        "cpu": _ffi.reason_against_dtype(dtype, sent, "cpu") or _ffi.reason_against_cpu(),
        # On GPUs the kernels have to be asked for: they have not yet been run on one.
        "cuda": _ffi.reason_against_dtype(dtype, sent, "cuda") or _ffi.reason_against_cuda()
        if asked
        else "not asked for",
    }
    if reasons["cuda"] is None and not isinstance(num_skipped, int):
        reasons["cuda"] = "k is traced (a schedule), and there it is part of the compiled call"
    # Asked for where it will run, and not there: said now, and not where the program is lowered.
    here = jax.default_backend()
    if here not in ("cpu", "gpu"):
        reasons = dict.fromkeys(reasons, f"there are no kernels for JAX's default backend here, {here}")
    elif asked and (reason := reasons[{"cpu": "cpu", "gpu": "cuda"}[here]]) is not None:
        return {here: reason}
    return reasons


def _reason_against(ring: Ring, mode: Mode, num_gather_skipped: int | jax.Array) -> str | None:
    """Why no kernels can do a reduction, on any platform. None if some can."""
    mesh = jax.sharding.get_abstract_mesh()
    if any(name not in mesh.manual_axes for name in ring.names):
        return f"the workers of axis {ring.names} are simulated (jax.vmap), they are no devices"
    if any(size > 1 and name not in mesh.manual_axes for name, size in mesh.shape.items()):
        auto = [name for name in mesh.axis_names if name not in mesh.manual_axes]
        return f"the mesh axes {auto} are not manual here, so the groups of workers are not known"
    if jax.__version_info__ < (0, 10, 2) and _other_axes(ring):
        return "this JAX cannot ask for a place on the mesh axes of an outer shard_map"
    if mode != "skip":
        return "mode='dropout' is for comparison, by lax.ppermute alone"
    if not isinstance(num_gather_skipped, int) or num_gather_skipped:
        return "num_gather_skipped is for comparison, by lax.ppermute alone"
    return None


def _groups(ring: Ring) -> np.ndarray:
    """All groups of workers that reduce with each other, a row each, of devices by their place in the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    places = np.arange(mesh.size).reshape(tuple(mesh.shape[name] for name in mesh.axis_names))
    axes = [mesh.axis_names.index(name) for name in ring.names]
    return np.moveaxis(places, axes, range(-len(axes), 0)).reshape(-1, ring.size)


def _group(ring: Ring) -> jax.Array:
    """A number that tells the group of workers that this one reduces with from all others, int32."""
    others = _other_axes(ring)
    return lax.axis_index(others) if others else jnp.int32(0)


def _other_axes(ring: Ring) -> tuple[Hashable, ...]:
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name in mesh.manual_axes and name not in ring.names)
