"""Which way a reduction runs: by `lax.ppermute`, or by the kernel of the platform."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jax_skipreduce._backends import ppermute
from jax_skipreduce._backends.cpu import CpuKernel
from jax_skipreduce._backends.cuda import CudaKernel
from jax_skipreduce._backends.kernel import Kernel, Place, group_number, other_axes, typed_like
from jax_skipreduce._backends.reduction import BACKENDS, Backend, Reduction
from jax_skipreduce._workers.group import Group

KERNELS: list[Kernel] = [CpuKernel(), CudaKernel()]


def chosen_backend(backend: Backend) -> Backend:
    """`backend`, where ``"auto"`` is what the environment variable SKIPREDUCE_BACKEND says."""
    if backend != "auto":
        return backend
    value = os.environ.get("SKIPREDUCE_BACKEND", "auto")
    if value not in BACKENDS:
        raise ValueError(f"SKIPREDUCE_BACKEND={value!r}: expected 'auto', 'xla' or 'native'")
    return value


def reduce_arrays(arrays: Sequence[jax.Array], group: Group, reduction: Reduction) -> list[jax.Array]:
    """All-reduces arrays of one dtype, each cut in N slices of its own. None of them is empty.

    Raises:
      ValueError: ``backend="native"``, and no kernel can do this.
    """
    backend = chosen_backend(reduction.backend)
    if backend == "xla" or group.size == 1:
        return ppermute.reduce_by_ppermute(arrays, group, reduction)
    reasons = _reasons_against(arrays[0].dtype, group, reduction, asked=backend == "native")
    kernels = [kernel for kernel in KERNELS if reasons[kernel] is None]
    if backend == "native":
        here = [kernel for kernel in KERNELS if kernel.backend == jax.default_backend()]
        # Raise while tracing if native was requested and is not available where the program will run.
        told = [reasons[kernel] for kernel in here or KERNELS]
        if not kernels or None not in told:
            texts = "; ".join(dict.fromkeys(str(reason) for reason in told))
            raise ValueError(f"backend='native': {texts}. Use backend='auto' or 'xla'; sr.native_info() says more")
    if not kernels:
        return ppermute.reduce_by_ppermute(arrays, group, reduction)
    return _by_platform(arrays, group, reduction, kernels, has_default=backend == "auto")


def _by_platform(
    arrays: Sequence[jax.Array], group: Group, reduction: Reduction, kernels: Sequence[Kernel], has_default: bool
) -> list[jax.Array]:
    """The kernel of the platform that the program is lowered for, else the ring; derivatives by the ring."""

    def native(kernel: Kernel) -> Any:
        def run(*operands: jax.Array) -> list[jax.Array]:
            place, own = Place(*operands[:4]), operands[4:]
            return typed_like(kernel.run(own, Group.of(group.names, place.rank), reduction, place), operands[2:], group)

        return run

    def by_ring(*operands: jax.Array) -> list[jax.Array]:
        place = Place(*operands[:4])
        own = reduction.with_operands(place.num_skipped, place.shift)
        return ppermute.reduce_by_ppermute(operands[4:], Group.of(group.names, place.rank), own)

    @jax.custom_jvp
    def reduce(*operands: jax.Array) -> list[jax.Array]:
        # Decided where the program is lowered, so that one program can be exported for several platforms.
        branches: dict[str, Any] = {kernel.platform: native(kernel) for kernel in kernels}
        if has_default:
            branches["default"] = by_ring
        return lax.platform_dependent(*operands, **branches)

    # An all-reduce is linear in the arrays. Tangents go through the ring of ppermutes, which JAX can transpose.
    @reduce.defjvp
    def reduce_jvp(
        primals: tuple[jax.Array, ...], tangents: tuple[Any, ...]
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        return reduce(*primals), by_ring(*primals[:4], *tangents[4:])

    numbers = (group_number(group), reduction.num_skipped, reduction.shift)
    place = (group.rank, *(jnp.asarray(number, jnp.int32) for number in numbers))
    return reduce(*place, *(group.local(array) for array in arrays))


def _reasons_against(dtype: Any, group: Group, reduction: Reduction, asked: bool) -> dict[Kernel, str | None]:
    """For each kernel the reason why it cannot do a reduction; None if it can."""
    reason = _reason_against_all(group, reduction)
    if reason is not None:
        return dict.fromkeys(KERNELS, reason)
    return {
        kernel: kernel.reason_against(dtype, group, reduction) if asked or kernel.is_automatic else "not asked for"
        for kernel in KERNELS
    }


def _reason_against_all(group: Group, reduction: Reduction) -> str | None:
    """The reason why no kernel can do a reduction, on any platform; None if some kernel can."""
    mesh = jax.sharding.get_abstract_mesh()
    if group.is_simulated:
        return f"the workers of axis {group.names} are simulated (jax.vmap), they are no devices"
    if any(size > 1 and name not in mesh.manual_axes for name, size in mesh.shape.items()):
        auto = [name for name in mesh.axis_names if name not in mesh.manual_axes]
        return f"the mesh axes {auto} are not manual here, so the groups of workers are not known"
    if jax.__version_info__ < (0, 10, 2) and other_axes(group):
        return "this JAX cannot ask for a place on the mesh axes of an outer shard_map"
    if reduction.mode != "skip":
        return "mode='dropout' is for comparison, by lax.ppermute alone"
    if not isinstance(reduction.num_gather_skipped, int) or reduction.num_gather_skipped:
        return "num_gather_skipped is for comparison, by lax.ppermute alone"
    here = jax.default_backend()
    if here not in {kernel.backend for kernel in KERNELS}:
        return f"there are no kernels for JAX's default backend here, {here}"
    return None
