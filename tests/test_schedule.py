import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jax_skipreduce._topologies import reference as _reference
from jax_skipreduce._topologies.ring import (
    RING,
    owned_slice,
    owner,
    slice_to_receive,
    slice_to_send,
)
from jax_skipreduce._topologies.schedule import Schedule, Transfer
from tests.helpers import contributors


@st.composite
def rings(draw):
    num_workers = draw(st.integers(1, 12))
    return (
        num_workers,
        draw(st.integers(0, num_workers - 1)),
        draw(st.integers(-20, 20)),
        draw(st.integers(0, num_workers - 1)),
    )


@given(rings())
def test_ring_reduces_over_the_contributors_of_the_paper(ring):
    num_workers, num_skipped, shift, _ = ring
    slices = np.repeat(2 ** np.arange(num_workers), num_workers).reshape(num_workers, num_workers)
    result = _reference.run(RING.schedule(num_workers, num_skipped, shift), slices)
    for j in range(num_workers):
        expected = sum(2**r for r in contributors(j, num_workers, num_skipped, shift))
        assert (result[:, j] == expected).all()


@given(rings())
def test_ring_sends_one_slice_per_worker_and_step(ring):
    num_workers, num_skipped, shift, num_gather_skipped = ring
    schedule = RING.schedule(num_workers, num_skipped, shift, num_gather_skipped)
    steps = RING.num_steps(num_workers, num_skipped, num_gather_skipped)
    assert len(schedule.steps) == steps == 2 * (num_workers - 1) - num_skipped - num_gather_skipped
    assert schedule.slices_sent() == (steps,) * num_workers
    for step in schedule.steps:
        assert {t.source for t in step} == {t.target for t in step} == set(range(num_workers))


@given(rings())
def test_who_sends_what_the_next_one_receives(ring):
    num_workers, num_skipped, shift, _ = ring
    for step in range(num_skipped, num_workers - 1):
        for rank in range(num_workers):
            assert slice_to_send(rank, step, shift, num_workers) == slice_to_receive(
                (rank + 1) % num_workers, step, shift, num_workers
            )
    for rank in range(num_workers):
        assert owner(owned_slice(rank, shift, num_workers), shift, num_workers) == rank


def test_arithmetic_is_that_of_arrays():
    ranks = np.arange(7)
    for function in (slice_to_send, slice_to_receive):
        assert list(function(ranks, 3, 5, 7)) == [function(rank, 3, 5, 7) for rank in range(7)]


def test_skipped_gather_steps_leave_out_the_next_workers():
    num_workers, num_gather_skipped = 5, 2
    slices = np.ones((num_workers, num_workers))
    result = _reference.run(RING.schedule(num_workers, 0, 0, num_gather_skipped), slices)
    for rank in range(num_workers):
        incomplete = {j for j in range(num_workers) if result[rank, j] != num_workers}
        assert incomplete == {owned_slice(rank + i, 0, num_workers) for i in (1, 2)}


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (Transfer(0, 3, 0, "copy"), "worker 3 is not in 0..2"),
        (Transfer(-1, 1, 0, "copy"), "worker -1 is not in 0..2"),
        (Transfer(1, 1, 0, "copy"), "sends to itself"),
        (Transfer(0, 1, 4, "reduce"), "slice 4 is not in 0..3"),
    ],
)
def test_a_schedule_is_checked(transfer, message):
    with pytest.raises(ValueError, match=message):
        Schedule(3, 4, ((transfer,),))


def test_a_slice_is_not_written_twice_in_a_step():
    with pytest.raises(ValueError, match="written twice"):
        Schedule(3, 3, ((Transfer(0, 2, 1, "reduce"), Transfer(1, 2, 1, "reduce")),))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "num_workers=0"), ((4, 4), "num_skipped=4"), ((4, -1), "num_skipped=-1"), ((4, 0, 0, 4), "num_gather")],
)
def test_a_ring_is_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        RING.schedule(*arguments)


def test_the_reference_checks_its_input():
    with pytest.raises(ValueError, match=r"slices.shape=\(3, 2\)"):
        _reference.run(RING.schedule(3), np.zeros((3, 2)))
