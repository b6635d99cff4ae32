"""Messages whose sums are known exactly, and the count of elements that are not what they have to be.

Knows nothing of how a ring works, only which workers each slice is added up from (section 4.2 of the paper).
"""

from __future__ import annotations

from collections.abc import Set

import jax
import jax.numpy as jnp
import numpy as np

from jax_skipreduce.programs.bench._settings import DType

# Integers up to these, and sums up to these, are exact.
_EXACT_UP_TO = {DType.BFLOAT16: 2**8, DType.FLOAT32: 2**24}

# A prime, so that no slice (and no chunk that a transport may make) is a multiple of it: elements that
# changed places do not look alike.
_PERIOD = 65_521


class Pattern:
    """The messages of all workers: small integers, drawn at random for each worker and element.

    All are at least 1, so a contribution that is missing or counted twice makes a wrong sum in every element.
    One that comes from another worker, or from another place, does so in all but a few by chance.

    Args:
      num_workers: N.
      dtypes: in which sums of messages, and of parts of them, have to be exact.
      seed: of the integers.

    Raises:
      ValueError: the exact integers of the dtypes do not suffice for so many workers.
    """

    def __init__(self, num_workers: int, dtypes: Set[DType], seed: int) -> None:
        limit = min(_EXACT_UP_TO[dtype] for dtype in dtypes)
        # No larger than a byte: they are kept as such.
        largest = min(limit // num_workers, 255)
        if largest < 2:
            narrow = min(dtypes, key=lambda dtype: _EXACT_UP_TO[dtype])
            raise ValueError(
                f"results in {narrow.value} can be checked with up to {limit // 2} workers, not {num_workers}: its "
                f"integers are exact up to {limit}"
            )
        self._table = np.random.default_rng(seed).integers(1, largest + 1, (num_workers, _PERIOD)).astype(np.uint8)

    def message(self, rank: int, num_elements: int, dtype: DType) -> np.ndarray:
        """What worker `rank` contributes."""
        return np.resize(self._table[rank].astype(jnp.dtype(dtype.value)), num_elements)

    def expected(self, num_elements: int, dtype: DType, num_skipped: int = 0, shift: int = 0) -> np.ndarray:
        """The sum that all workers have to hold: slice j lacks the workers j-c, .., j-c+k-1 (mod N)."""
        num_workers = len(self._table)
        size = -(-num_elements // num_workers)
        total = self._table.sum(0, dtype=np.int64)
        slices = []
        for index, start in enumerate(range(0, num_elements, size)):
            skipped = [(index - shift + i) % num_workers for i in range(num_skipped)]
            sums = total - self._table[skipped].sum(0, dtype=np.int64)
            from_start = np.roll(sums, -start).astype(jnp.dtype(dtype.value))
            slices.append(np.resize(from_start, min(size, num_elements - start)))
        return np.concatenate(slices)


def count_wrong(result: jax.Array, expected: np.ndarray) -> int:
    """Elements that differ from what is expected, on each worker of this process, added up. NaN is wrong, too."""
    return sum(int(np.count_nonzero(np.asarray(shard.data) != expected)) for shard in result.addressable_shards)
