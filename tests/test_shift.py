import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_skipreduce._gradients.shift import random_shifts, step_keys
from tests.helpers import contributors


def shifts_of_steps(num_steps, num_buckets, num_workers, seed=0):
    counts = jnp.arange(num_steps, dtype=jnp.int32)
    return np.asarray(jax.jit(jax.vmap(lambda count: random_shifts(seed, count, num_buckets, num_workers)))(counts))


def chi_squared(observed):
    expected = observed.sum() / observed.size
    return ((observed - expected) ** 2 / expected).sum()


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_every_worker_contributes_to_every_slice_equally_often(num_workers):
    num_steps = 4000
    shifts = shifts_of_steps(num_steps, 2, num_workers)
    # chi-squared exceeds mean + 6 standard deviations with a probability far below 1e-6.
    for bucket in range(2):
        counts = np.bincount(shifts[:, bucket], minlength=num_workers)
        freedom = num_workers - 1
        assert chi_squared(counts) < freedom + 6 * np.sqrt(2 * freedom)
        for k in range(num_workers):
            times = np.zeros((num_workers, num_workers))
            for shift, count in enumerate(counts):
                for j in range(num_workers):
                    times[sorted(contributors(j, num_workers, k, shift)), j] += count
            share = (num_workers - k) / num_workers
            deviation = np.abs(times / num_steps - share).max()
            assert deviation <= 5 * np.sqrt(share * (1 - share) / num_steps)


def test_buckets_and_steps_move_independently():
    shifts = shifts_of_steps(8000, 3, 8)
    for one, other in ((shifts[:, 0], shifts[:, 1]), (shifts[:, 1], shifts[:, 2]), (shifts[:-1, 0], shifts[1:, 0])):
        joint = np.zeros((8, 8))
        np.add.at(joint, (one, other), 1)
        assert chi_squared(joint) < 63 + 6 * np.sqrt(2 * 63)


def test_shift_is_a_function_of_seed_counter_and_bucket():
    first = shifts_of_steps(50, 2, 8, seed=1)
    np.testing.assert_array_equal(first, shifts_of_steps(50, 2, 8, seed=1))
    assert (first != shifts_of_steps(50, 2, 8, seed=2)).any()
    # More buckets do not move those that were there.
    np.testing.assert_array_equal(first, shifts_of_steps(50, 5, 8, seed=1)[:, :2])
    assert first.dtype == np.int32
    assert first.min() >= 0
    assert first.max() <= 7


def test_shift_does_not_depend_on_the_default_generator():
    expected = shifts_of_steps(10, 2, 8)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(shifts_of_steps(10, 2, 8), expected)


def test_shift_does_not_depend_on_the_width_of_integers():
    expected = shifts_of_steps(20, 3, 7)
    with jax.enable_x64(True):
        got = shifts_of_steps(20, 3, 7)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, expected)


def test_the_keys_of_a_step_differ():
    keys = jax.random.key_data(step_keys(0, jnp.int32(5), 4))
    assert len({tuple(key) for key in np.asarray(keys)}) == 4
