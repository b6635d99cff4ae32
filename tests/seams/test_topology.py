"""What a topology gets: it runs in every program, and what is sent is its schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_skipreduce._backends.ppermute import reduce_by_ppermute
from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._compressors.skip import Skip
from jax_skipreduce._topologies import reference
from jax_skipreduce._topologies.ring import RING
from jax_skipreduce._workers.group import Group
from jax_skipreduce._workers.wire import Wire
from tests.helpers import bits, collectives, each_worker, normal, powers_of_two
from tests.seams.toys import Direct, Star

N = 4


@pytest.mark.parametrize("topology", [Direct(), Star(), RING], ids=lambda topology: topology.name)
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8])
def test_contributors_of_a_topology(topology, num_workers):
    x = powers_of_two(num_workers, 2 * num_workers + 1)
    width = 3
    for k in range(topology.max_skipped(num_workers) + 1):
        schedule = topology.schedule(num_workers, k)
        held = schedule.contributors()
        owners = schedule.owners()
        for runner, shift in (("vmap", 0), ("shard_map", 1)):

            def reduce(x, k=k, shift=shift):
                reduction = Reduction(num_skipped=k, shift=shift, normalize=None, topology=topology)
                return reduce_by_ppermute([x], Group.of("data"), reduction)[0]

            result = np.asarray(each_worker(runner, reduce, num_workers)(x))
            assert all(bits(row) == bits(result[0]) for row in result)
            for place in range(x.shape[1]):
                j = (place // width - shift) % num_workers
                assert result[0][place] == sum(2.0**r for r in held[owners[j]][j]), (k, place)


@pytest.mark.parametrize("topology", [Direct(), Star()], ids=lambda topology: topology.name)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_topology_in_any_program(topology, dtype, check_vma):
    """Traced k, a narrow wire, 16 bits: what all workers get is the same, and what NumPy makes of the schedule."""
    wide = dtype != jnp.float32
    x = normal((N, 1037), dtype)
    wire = Wire.of(None if wide else "bfloat16")
    runner = "shard_map" if check_vma else "shard_map_unchecked"

    def reduce(x, k, shift):
        reduction = Reduction(num_skipped=k, shift=shift, normalize=None, wire=wire, topology=topology)
        return reduce_by_ppermute([x], Group.of("data"), reduction)[0]

    run = each_worker(runner, reduce, N)
    for k in range(N):
        result = np.asarray(run(x, jnp.int32(k), jnp.int32(0)))
        slices = np.pad(np.asarray(x), ((0, 0), (0, 3))).reshape(N, N, -1)
        options = {"accumulator": np.float32} if wide else {"wire_dtype": jnp.bfloat16}
        expected = reference.run(topology.schedule(N, k), slices, **options).reshape(N, -1)[:, :1037]
        np.testing.assert_array_equal(result, expected)
    assert run._cache_size() == 1


@pytest.mark.parametrize("topology", [Direct(), Star()], ids=lambda topology: topology.name)
def test_means_and_derivatives_of_a_topology(topology):
    ones = jnp.ones((N, 9))
    for k in range(N):
        for normalize, expected in (("drop", 1.0), ("skip", (N - k) / N)):
            reduction = Reduction(num_skipped=k, shift=1, normalize=normalize, topology=topology)

            def reduce(x, reduction=reduction):
                return reduce_by_ppermute([x], Group.of("data"), reduction)[0]

            np.testing.assert_allclose(each_worker("shard_map", reduce, N)(ones), expected, rtol=1e-6)
    # Each element is in N - k = 1 of the sums; the gradient of their sum over workers says whose.
    total = jax.vmap(jax.grad(lambda x: reduce(x).sum()), axis_name="data")(ones)
    np.testing.assert_allclose(np.asarray(total).sum(), 9 / N * N, rtol=1e-6)


class Short(Direct):
    """One slice for all workers, which the executor does not cut."""

    def schedule(self, num_workers, num_skipped=0, shift=0, num_gather_skipped=0):
        return dataclasses.replace(super().schedule(1, 0), num_workers=num_workers, num_slices=1)


class Lossy(Star):
    """The last worker gets nothing back."""

    def schedule(self, num_workers, num_skipped=0, shift=0, num_gather_skipped=0):
        whole = super().schedule(num_workers, num_skipped)
        return dataclasses.replace(whole, steps=whole.steps[:-1])


@pytest.mark.parametrize(
    ("topology", "message"),
    [(Short(), r"a schedule of 1 slices for 4 workers: expected 4 of both"), (Lossy(), "worker 3 never gets slice 0")],
)
def test_a_schedule_that_would_give_wrong_numbers_is_refused(topology, message):
    with pytest.raises(ValueError, match=message):
        jax.vmap(lambda x: reduce_by_ppermute([x], Group.of("data"), Reduction(topology=topology)), axis_name="data")(
            jnp.ones((4, 8))
        )


@pytest.mark.parametrize("topology", [RING, Direct()], ids=lambda topology: topology.name)
@pytest.mark.parametrize("num_skipped", [0, 1, 3, 7])
def test_what_is_sent_is_the_schedule(topology, num_skipped):
    """Permutes of the lowered program and their bytes, against the steps of the schedule and its slices."""
    skip = Skip(num_skipped / 8, mode="static", topology=topology)

    def reduce(x):
        (plan,) = skip.plan_buckets([num_skipped], Group.of("data"), jnp.int32(0))
        return skip.reduce([x], [None], plan, Group.of("data"))[0][0]

    run = each_worker("shard_map", reduce, 8)
    x = normal((8, 803))
    sent = collectives(run.lower(x).compile().as_text())
    permutes = [shape for shape, operation in sent if operation == "collective-permute"]
    schedule = topology.schedule(8, num_skipped)
    assert len(permutes) == len(schedule.reduce_steps) == 7 - num_skipped
    assert len(schedule.copy_steps) == 7  # one all-gather, of 7 slices a worker
    assert [operation for _, operation in sent if operation != "collective-permute"] == ["all-gather"]
    assert {int(np.prod([int(n) for n in shape.split("[")[1].split("]")[0].split(",")])) for shape in permutes} <= {101}
    assert topology.slices_sent(8, num_skipped) == len(permutes) + 7
    assert topology.num_steps(8, num_skipped) == len(schedule.steps)
    forecast = skip.forecast([jax.ShapeDtypeStruct((803,), jnp.float32)], 8, 1, 0)
    assert forecast.leaves[0].wire_bytes == (len(permutes) + 7) * 101 * 4


def test_closed_forms_of_the_ring():
    for num_workers in range(1, 10):
        for k in range(num_workers):
            for g in range(num_workers):
                schedule = RING.schedule(num_workers, k, 0, g)
                assert RING.num_steps(num_workers, k, g) == len(schedule.steps)
                assert {RING.slices_sent(num_workers, k, g)} == set(schedule.slices_sent())


def test_what_only_the_ring_does_is_refused():
    for change, message in (
        ({"mode": "dropout", "key": jax.random.key(0)}, "no dropout"),
        ({"num_gather_skipped": 1}, "gathers in full"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.vmap(
                lambda x: reduce_by_ppermute([x], Group.of("data"), Reduction(topology=Direct(), **change)),  # noqa: B023
                axis_name="data",
            )(jnp.ones((3, 8)))
