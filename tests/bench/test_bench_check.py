"""The check passes what is right, and finds faults that were planted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._topologies import reference as _reference
from jax_skipreduce._topologies.ring import RING
from jax_skipreduce.programs.bench._candidates import AXIS, Candidate, reduction
from jax_skipreduce.programs.bench._check import Pattern, count_wrong
from jax_skipreduce.programs.bench._settings import DType, Mode
from tests.helpers import collectives, data_mesh

F32, BF16 = DType.FLOAT32, DType.BFLOAT16
NUM_WORKERS, NUM_ELEMENTS = 4, 1000


def reduced(reduce, pattern, num_workers=NUM_WORKERS, num_elements=NUM_ELEMENTS, dtype=F32, shift=0):
    """What `reduce` of (message, shift) gives on each worker; replicas may differ."""
    mesh = data_mesh(num_workers)
    messages = np.concatenate([pattern.message(rank, num_elements, dtype) for rank in range(num_workers)])
    specs = (P(AXIS), P())
    mapped = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    return mapped(jax.device_put(messages, NamedSharding(mesh, P(AXIS))), jnp.int32(shift))


@pytest.mark.parametrize(("num_workers", "num_elements"), [(2, 7), (3, 1001), (8, 1), (8, 40)])
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_passes_what_is_right(num_workers, num_elements, dtype):
    pattern = Pattern(num_workers, {dtype, BF16}, seed=1)
    candidates = [Candidate("psum", dtype)]
    if dtype == F32:
        candidates.append(Candidate("psum-bf16", BF16))
    candidates += [
        Candidate("ring", wire, num_skipped, mode)
        for wire in {dtype, BF16}
        for num_skipped in {0, 1, num_workers - 1}
        for mode in Mode
    ]
    shift = num_workers - 1

    def all_of_them(x, shift):
        return [reduction(candidate, dtype)(x, shift) for candidate in candidates]

    results = reduced(all_of_them, pattern, num_workers, num_elements, dtype, shift)
    for candidate, result in zip(candidates, results, strict=True):
        used = shift if candidate.is_shifted else 0
        assert result.dtype == jnp.dtype(dtype.value)
        assert len(result.addressable_shards) == num_workers
        expected = pattern.expected(num_elements, dtype, candidate.num_skipped, used)
        assert count_wrong(result, expected) == 0, candidate


@pytest.mark.parametrize("num_workers", [2, 5, 8])
def test_expected_is_what_the_schedule_gives(num_workers):
    pattern = Pattern(num_workers, {F32}, seed=0)
    size = 11
    messages = np.stack([pattern.message(rank, num_workers * size, F32) for rank in range(num_workers)])
    for num_skipped in range(num_workers):
        for shift in range(num_workers):
            slices = messages.reshape(num_workers, num_workers, size)
            held = _reference.run(RING.schedule(num_workers, num_skipped, shift), slices)
            expected = pattern.expected(num_workers * size, F32, num_skipped, shift)
            for row in held.reshape(num_workers, -1):
                np.testing.assert_array_equal(row, expected)


def test_messages_are_small_and_say_who_and_where():
    pattern = Pattern(8, {F32, BF16}, seed=0)
    messages = [pattern.message(rank, 100_000, BF16).astype(int) for rank in range(8)]
    assert min(message.min() for message in messages) == 1
    assert sum(message.max() for message in messages) <= 256  # exact in bfloat16, whatever the order
    for rank in range(1, 8):
        assert np.mean(messages[rank] == messages[0]) < 0.05
    assert np.mean(messages[0][:-1] == messages[0][1:]) < 0.05
    # The table of numbers repeats, but not at the same place of a slice.
    assert np.mean(messages[0][: 2**15] == messages[0][2**16 : 2**16 + 2**15]) < 0.05
    np.testing.assert_array_equal(
        pattern.message(3, 10, F32), pattern.message(3, 100_000, BF16)[:10].astype(np.float32)
    )


def test_says_when_sums_cannot_be_exact():
    Pattern(128, {BF16}, seed=0)
    with pytest.raises(ValueError, match="bfloat16 can be checked with up to 128 workers, not 129"):
        Pattern(129, {F32, BF16}, seed=0)
    Pattern(129, {F32}, seed=0)


def test_finds_that_another_worker_is_skipped():
    pattern = Pattern(NUM_WORKERS, {F32}, seed=0)
    result = reduced(lambda x, _: sr.all_reduce(x, AXIS, num_skipped=1, shift=1, normalize=None), pattern)
    wrong = count_wrong(result, pattern.expected(NUM_ELEMENTS, F32, num_skipped=1, shift=0))
    assert wrong > 0.95 * NUM_WORKERS * NUM_ELEMENTS


@pytest.mark.parametrize(("done", "expected"), [(0, 1), (1, 0), (2, 1)])
def test_finds_another_number_of_skipped_workers(done, expected):
    pattern = Pattern(NUM_WORKERS, {F32, BF16}, seed=0)
    result = reduced(lambda x, _: sr.all_reduce(x, AXIS, num_skipped=done, normalize=None), pattern)
    # No message has a zero, so every element tells.
    assert count_wrong(result, pattern.expected(NUM_ELEMENTS, F32, expected)) == NUM_WORKERS * NUM_ELEMENTS


@pytest.mark.parametrize("num_skipped", [0, 2])
def test_finds_slices_that_changed_places(num_skipped):
    def swap(x, _):
        slices = sr.all_reduce(x, AXIS, num_skipped=num_skipped, normalize=None).reshape(NUM_WORKERS, -1)
        return slices[jnp.array([1, 0, 2, 3])].reshape(-1)

    pattern = Pattern(NUM_WORKERS, {F32, BF16}, seed=0)
    wrong = count_wrong(reduced(swap, pattern), pattern.expected(NUM_ELEMENTS, F32, num_skipped))
    # Half of all elements, but for those that are alike by chance.
    assert 0.95 < wrong / (NUM_WORKERS * NUM_ELEMENTS / 2) <= 1


def test_finds_one_element_that_was_not_added():
    def drop(x, _):
        return lax.psum(x.at[7].multiply(jnp.where(lax.axis_index(AXIS) == 2, 0.0, 1.0)), AXIS)

    pattern = Pattern(NUM_WORKERS, {F32}, seed=0)
    assert count_wrong(reduced(drop, pattern), pattern.expected(NUM_ELEMENTS, F32)) == NUM_WORKERS


@pytest.mark.parametrize("fault", [1.0, np.nan])
def test_finds_one_element_on_one_worker(fault):
    def differ(x, _):
        return lax.psum(x, AXIS).at[5].add(jnp.where(lax.axis_index(AXIS) == 3, fault, 0.0))

    pattern = Pattern(NUM_WORKERS, {F32}, seed=0)
    assert count_wrong(reduced(differ, pattern), pattern.expected(NUM_ELEMENTS, F32)) == 1


def test_finds_elements_that_moved_by_one():
    pattern = Pattern(NUM_WORKERS, {F32, BF16}, seed=0)
    result = reduced(lambda x, _: jnp.roll(lax.psum(x, AXIS), 1), pattern)
    assert count_wrong(result, pattern.expected(NUM_ELEMENTS, F32)) > 0.9 * NUM_WORKERS * NUM_ELEMENTS


@pytest.mark.parametrize(("wire", "on_the_wire"), [(F32, "f32"), (BF16, "u16")])
@pytest.mark.parametrize("num_skipped", [0, 2, 3])
def test_the_ring_sends_what_the_table_says(wire, on_the_wire, num_skipped):
    mesh = data_mesh(NUM_WORKERS)
    reduce = reduction(Candidate("ring", wire, num_skipped, Mode.RANDOM), F32)
    mapped = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P()))
    program = mapped.lower(jnp.zeros(NUM_WORKERS * NUM_ELEMENTS), jnp.int32(1)).compile().as_text()
    found = collectives(program)
    assert all(on_the_wire + "[" in kind for kind, _ in found), found
    names = [name for _, name in found]
    assert names.count("collective-permute") == NUM_WORKERS - 1 - num_skipped
    assert names.count("all-gather") == 1
