"""Reduction: the one record that every way to run a reduction takes."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from jax_skipreduce._topologies.ring import RING
from jax_skipreduce._topologies.topology import Topology
from jax_skipreduce._workers.arguments import checked_count, checked_shift
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.mean import Normalize, check_normalize
from jax_skipreduce._workers.wire import AS_THEY_ARE, Wire

Mode = Literal["skip", "dropout"]
Backend = Literal["auto", "xla", "native"]

BACKENDS = ("auto", "xla", "native")


@dataclasses.dataclass(frozen=True)
class Reduction:
    """How arrays are added up over the workers of a group. The names are those of `all_reduce`.

    Attributes:
      num_skipped: k, reduce-scatter steps left out; an int, or a traced int32 in range.
      shift: c, added to every slice index; an int, or a traced int32.
      normalize: what sums are divided by; None: they are not divided.
      mode: whether steps are left out, or single elements.
      key: PRNG key of ``mode="dropout"``.
      num_gather_skipped: all-gather steps left out.
      wire: the format in which values are sent.
      topology: who sends which slice to whom.
      backend: which way slices travel.
      in_place: whether native kernels write results where the arrays were. That takes half the memory and half the
        time, if the arrays are not needed any more.
    """

    num_skipped: int | jax.Array = 0
    shift: int | jax.Array = 0
    normalize: Normalize | None = "skip"
    mode: Mode = "skip"
    key: jax.Array | None = None
    num_gather_skipped: int | jax.Array = 0
    wire: Wire = AS_THEY_ARE
    topology: Topology = RING
    backend: Backend = "auto"
    in_place: bool = False

    def checked(self, group: Group) -> Reduction:
        """This reduction, by the workers of `group`, with every field checked.

        Raises:
          TypeError, ValueError: as in `all_reduce`.
        """
        check_normalize(self.normalize, allow_none=True)
        if self.mode not in ("skip", "dropout"):
            raise ValueError(f"mode={self.mode!r}: expected 'skip' or 'dropout'")
        if self.mode == "dropout" and self.key is None:
            raise TypeError("key=None: mode='dropout' needs a PRNG key, such as jax.random.key(step)")
        check_backend(self.backend)
        return dataclasses.replace(
            self,
            num_skipped=checked_count("num_skipped", self.num_skipped, group, self.topology.max_skipped(group.size)),
            shift=checked_shift("shift", self.shift, group),
            num_gather_skipped=checked_count("num_gather_skipped", self.num_gather_skipped, group),
        )

    def with_operands(self, num_skipped: jax.Array, shift: jax.Array) -> Reduction:
        """This reduction in a program of its own, whose operands take the place of what is traced.

        Numbers that are known stay numbers: they make a shorter program than operands.
        """
        return dataclasses.replace(
            self,
            num_skipped=self.num_skipped if isinstance(self.num_skipped, int) else num_skipped,
            shift=self.shift if isinstance(self.shift, int) else shift,
        )


def check_backend(backend: Any) -> Backend:
    """`backend`, checked. Raises ValueError if there is no backend of this name."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected 'auto', 'xla' (lax.ppermute) or 'native' (one custom call)")
    return backend
