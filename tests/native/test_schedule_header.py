"""xla_ffi/ring_schedule.h against _topologies/ring.py: the handlers and the ring of ppermutes take the same slices."""

import pytest

from jax_skipreduce._backends import ffi as _ffi
from jax_skipreduce._topologies import ring as _ring
from tests.helpers import contributors

pytestmark = pytest.mark.native


@pytest.mark.parametrize("num_workers", range(1, 17))
def test_same_slices(num_workers):
    native = _ffi.library()
    ranks = range(num_workers)
    for num_skipped in ranks:
        for shift in (*range(-num_workers, num_workers + 1), 2**31 - 1, -(2**31)):
            for rank in ranks:
                for step in range(num_skipped, num_workers - 1):
                    arguments = (num_workers, num_skipped, shift, rank, step)
                    assert native.skipreduce_slice_to_send(*arguments) == _ring.slice_to_send(
                        rank, step, shift, num_workers
                    )
                    assert native.skipreduce_slice_to_receive(*arguments) == _ring.slice_to_receive(
                        rank, step, shift, num_workers
                    )
                arguments = (num_workers, num_skipped, shift, rank)
                assert native.skipreduce_owned_slice(*arguments) == _ring.owned_slice(rank, shift, num_workers)
                assert native.skipreduce_owner(*arguments) == _ring.owner(rank, shift, num_workers)
                assert native.skipreduce_next(num_workers, rank) == _ring.next_rank(rank, num_workers)


@pytest.mark.parametrize("num_workers", [1, 2, 5, 8])
def test_contributors_are_those_of_the_paper_and_the_last_one_owns_the_sum(num_workers):
    native = _ffi.library()
    for num_skipped in range(num_workers):
        for shift in (0, 1, -3, 100):
            for index in range(num_workers):
                chain = [
                    native.skipreduce_contributor(num_workers, num_skipped, shift, index, position)
                    for position in range(num_workers - num_skipped)
                ]
                assert set(chain) == contributors(index, num_workers, num_skipped, shift)
                assert chain[-1] == _ring.owner(index, shift, num_workers)
