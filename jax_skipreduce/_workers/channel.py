"""How values pass between the workers of a group: the group and the wire format, together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.wire import AS_THEY_ARE, Wire


@dataclasses.dataclass(frozen=True)
class Channel:
    """Sends values of any dtype between the workers of `group`, in the format of `wire`."""

    group: Group
    wire: Wire = AS_THEY_ARE

    def __post_init__(self) -> None:
        # One worker sends nothing, so it has nothing to round.
        if self.group.size == 1:
            object.__setattr__(self, "wire", AS_THEY_ARE)

    def permute(self, x: jax.Array, pairs: Sequence[tuple[int, int]]) -> jax.Array:
        """`Group.permute` of `x` as it is sent: rounded to the wire format."""
        return self.wire.move(lambda y: self.group.permute(y, pairs), x)

    def gather(self, x: jax.Array) -> jax.Array:
        """`Group.gather` of `x` as it is sent: rounded to the wire format, this worker's own row included."""
        if self.group.size == 1 and not self.group.tracked:
            return x[None]  # with tracking on, only a collective can say that all workers share it
        return self.wire.move(self.group.gather, x)

    def round(self, x: jax.Array) -> jax.Array:
        """`x` with the values that would arrive at another worker."""
        return self.wire.round(x)
