"""The native CUDA kernels: one custom call over the communicator that XLA has for the devices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jax_skipreduce._backends import ffi
from jax_skipreduce._backends.kernel import Kernel, Place
from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._topologies.ring import Ring
from jax_skipreduce._workers.blocks import from_block, to_block
from jax_skipreduce._workers.group import Group

_DTYPES = ("float32", "bfloat16", "float16")


class CudaKernel(Kernel):
    """Floats of 16 and 32 bits, a static k."""

    platform: ClassVar[str] = "cuda"
    backend: ClassVar[str] = "gpu"
    is_automatic: ClassVar[bool] = False  # not yet run on a GPU

    def reason_against(self, dtype: Any, group: Group, reduction: Reduction) -> str | None:
        """The reason why the kernel cannot; see `Kernel.reason_against`."""
        del group
        if not isinstance(reduction.topology, Ring):
            return f"topology={reduction.topology.name!r}: this kernel knows the ring alone"
        sent = reduction.wire.sent_as(dtype)
        if reason := ffi.reason_against_dtype(dtype, sent, _DTYPES) or ffi.reason_against_cuda():
            return reason
        if not isinstance(reduction.num_skipped, int):
            return "k is traced (a schedule), and there it is part of the compiled call"
        return None

    def run(self, arrays: Sequence[jax.Array], group: Group, reduction: Reduction, place: Place) -> list[jax.Array]:
        """One call for all arrays, joined in a block."""
        assert isinstance(reduction.num_skipped, int)  # reason_against refuses a traced k
        blocks = [to_block(array, group.size) for array in arrays]
        ends = list(itertools.accumulate(block.shape[1] for block in blocks))
        joined = jnp.concatenate(blocks, axis=1) if len(blocks) > 1 else blocks[0]
        # Rows are padded to multiples of 16 bytes, which the kernels move in one access.
        joined = jnp.pad(joined, ((0, 0), (0, -joined.shape[1] % 8)))
        sent = reduction.wire.sent_as(joined.dtype)
        reduced = ffi.all_reduce_cuda(
            joined,
            place.shift,
            num_workers=group.size,
            num_skipped=reduction.num_skipped,
            normalize=reduction.normalize,
            wire_dtype=None if sent == joined.dtype else sent,
            replica_groups=_replica_groups(group),
        )
        columns = jnp.split(reduced, ends, axis=1)[: len(arrays)]
        return [from_block(column, array.shape) for column, array in zip(columns, arrays, strict=True)]


def _replica_groups(group: Group) -> np.ndarray:
    """All groups of workers that reduce with each other, a row each, of devices by their place in the mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    places = np.arange(mesh.size).reshape(tuple(mesh.shape[name] for name in mesh.axis_names))
    axes = [mesh.axis_names.index(name) for name in group.names]
    return np.moveaxis(places, axes, range(-len(axes), 0)).reshape(-1, group.size)
