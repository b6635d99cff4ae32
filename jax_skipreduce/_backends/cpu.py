"""The native CPU kernel: one custom call between the CPU devices of a process, in shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax

from jax_skipreduce._backends import ffi
from jax_skipreduce._backends.kernel import Kernel, Place
from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._topologies.ring import Ring
from jax_skipreduce._workers.group import Group

_DTYPES = ("float32", "bfloat16", "float16", "float64")


class CpuKernel(Kernel):
    """Floats of 16 to 64 bits. k and shift are operands, so a traced k (a schedule) is served, too."""

    platform: ClassVar[str] = "cpu"
    backend: ClassVar[str] = "cpu"
    is_automatic: ClassVar[bool] = True

    def reason_against(self, dtype: Any, group: Group, reduction: Reduction) -> str | None:
        """The reason why the kernel cannot; see `Kernel.reason_against`."""
        del group
        if not isinstance(reduction.topology, Ring):
            return f"topology={reduction.topology.name!r}: this kernel knows the ring alone"
        sent = reduction.wire.sent_as(dtype)
        return ffi.reason_against_dtype(dtype, sent, _DTYPES) or ffi.reason_against_cpu()

    def run(self, arrays: Sequence[jax.Array], group: Group, reduction: Reduction, place: Place) -> list[jax.Array]:
        """One call for all arrays, each cut in slices by the kernel."""
        dtype = arrays[0].dtype
        sent = reduction.wire.sent_as(dtype)
        return ffi.all_reduce_cpu(
            arrays,
            place.rank,
            place.group_number,
            place.num_skipped,
            place.shift,
            num_workers=group.size,
            normalize=reduction.normalize,
            wire_dtype=None if sent == dtype else sent,
            in_place=reduction.in_place,
        )
