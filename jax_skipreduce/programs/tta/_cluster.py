"""The workers of a training, be they processes in a lab or devices of this process, seen from one process."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jax_skipreduce._checks.replicas import fingerprint
from jax_skipreduce.programs.common.methods import place

AXIS = "data"

_SHARED, _OWN = PartitionSpec(), PartitionSpec(AXIS)


class Cluster:
    """N workers, one per device.

    Args:
      devices: of all processes, in the order of the ranks.

    Attributes:
      mesh: of one axis, `AXIS`.
      num_workers: N.
      local_ranks: the workers whose devices belong to this process.
      is_first: whether worker 0 does: it keeps the clock and writes results.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.mesh = jax.make_mesh((len(devices),), (AXIS,), (AxisType.Auto,), devices=devices)
        self.num_workers = len(devices)
        own = jax.process_index()
        self.local_ranks = tuple(rank for rank, device in enumerate(devices) if device.process_index == own)
        self.is_first = 0 in self.local_ranks
        self._barrier = self._map(lambda x: lax.psum(x, AXIS), (_OWN,), _SHARED)
        self._gather = self._map(lambda x: lax.all_gather(x, AXIS, tiled=True, to="invarying"), (_OWN,), _SHARED)
        self._checksums = self._map(lambda tree: _checksum(tree)[None], (_SHARED,), _OWN)
        self._one = self.deal(lambda _: np.ones(1, np.int32))

    def _map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs))

    def deal(self, rows_of: Callable[[int], np.ndarray]) -> jax.Array:
        """An array whose rows are ``rows_of(rank)``, of the same shape for all; each worker holds its own."""
        local = np.concatenate([rows_of(rank) for rank in self.local_ranks])
        return jax.make_array_from_process_local_data(NamedSharding(self.mesh, _OWN), local)

    def share(self, tree: Any) -> Any:
        """A pytree of arrays that all processes computed alike, as arrays that all workers hold."""
        return place(tree, _SHARED, self.mesh)

    def barrier(self) -> None:
        """Waits for all workers."""
        jax.block_until_ready(self._barrier(self._one))

    def gather(self, values_of: Callable[[int], Sequence[float]]) -> np.ndarray:
        """The float32 values of all workers: shape (N, number of values), the same in all processes."""
        rows = self.deal(lambda rank: np.asarray(values_of(rank), np.float32)[None])
        return np.asarray(self._gather(rows))

    def from_first(self, values: Sequence[float]) -> np.ndarray:
        """The values that worker 0 has, in all processes."""
        return self.gather(lambda _: values)[0]

    def checksum(self, tree: Any) -> str:
        """Checksum of the bits of a pytree that all workers hold.

        Raises:
          RuntimeError: workers hold different bits.
        """
        return self._same(np.asarray(self._gather(self._checksums(tree))), "the replicas of the parameters")

    def checksum_of_own(self, rows_of: Callable[[int], np.ndarray]) -> str:
        """Checksum of what each worker holds for itself."""
        sums = self.gather_bits(lambda rank: zlib.crc32(np.ascontiguousarray(rows_of(rank)).tobytes()))
        return f"{zlib.crc32(sums.tobytes()):08x}"

    def gather_bits(self, value_of: Callable[[int], int]) -> np.ndarray:
        """32 bits of each worker: uint32 of shape (N,)."""
        return np.asarray(self._gather(self.deal(lambda rank: np.array([value_of(rank)], np.uint32))))

    @staticmethod
    def _same(sums: np.ndarray, what: str) -> str:
        if len(set(sums.tolist())) > 1:
            raise RuntimeError(
                f"{what} differ between workers: checksums {', '.join(f'{value:08x}' for value in sums.tolist())}. "
                "The method gives workers different means, or processes run different programs"
            )
        return f"{sums[0]:08x}"


def _checksum(tree: Any) -> jax.Array:
    """32 bits of this worker's arrays, a uint32 scalar: the fingerprints that replicas are compared by, joined."""
    total = jnp.uint32(0)
    for leaf in jax.tree.leaves(tree):
        total = total * jnp.uint32(31) + fingerprint(leaf)
    return lax.pcast(total, AXIS, to="varying")
