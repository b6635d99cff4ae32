"""Skip ratios by layer: a pytree of numbers and schedules, or a function of path and leaf."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jax_skipreduce as sr
from tests.helpers import bits, collectives, contributors, expected_sum, normal, powers_of_two, replicated_step, update


def ramp(count):
    return jnp.where(count < 5, 0.0, 0.75)


@pytest.mark.parametrize("count", [0, 7])
def test_each_leaf_has_its_own_contributors(count):
    grads = {
        "a": powers_of_two(8, 16),
        "b": {"c": powers_of_two(8, 24), "d": powers_of_two(8, 8)},
        "e": powers_of_two(8, 8),
    }
    ratios = {"a": 0.5, "b": 0.25, "e": ramp}
    tx = sr.skipreduce("data", ratios, mode="static", min_size=1)
    mean = replicated_step(update(tx, count), 8)(grads)
    for leaf, k in ((mean["a"], 4), (mean["b"]["c"], 2), (mean["b"]["d"], 2)):
        np.testing.assert_array_equal(8 * leaf, expected_sum(8, k, 0, slice_size=leaf.size // 8))
    k = 0 if count < 5 else 6
    expected = [sum(2.0**r for r in contributors(j, 8, k)) for j in range(8)]
    np.testing.assert_array_equal(8 * mean["e"], expected)


def test_a_function_of_path_and_leaf_says_the_same():
    grads = {"a": normal((8, 160)), "b": {"c": normal((8, 24)), "d": normal((8, 8))}}
    by_tree = sr.skipreduce("data", {"a": 0.5, "b": ramp}, min_size=1)
    by_path = sr.skipreduce("data", lambda path, leaf: ramp if path.startswith("b/") else 0.5, min_size=1)
    one, other = (replicated_step(update(tx, 6), 8)(grads) for tx in (by_tree, by_path))
    assert jax.tree.map(bits, one) == jax.tree.map(bits, other)


def test_the_same_ratio_for_all_is_the_ratio():
    grads = {"a": normal((8, 160)), "b": normal((8, 24))}
    one, other = (
        replicated_step(update(sr.skipreduce("data", ratio, min_size=1), 3), 8)(grads)
        for ratio in (0.5, {"a": 0.5, "b": 0.5})
    )
    assert jax.tree.map(bits, one) == jax.tree.map(bits, other)


def test_leaves_of_one_k_share_a_bucket():
    grads = {name: normal((8, 80)) for name in "abcd"}
    # 0.5 and 0.51 are both four steps of seven.
    ratios = {"a": 0.5, "b": 0.25, "c": 0.51, "d": 0.25}
    tx = sr.skipreduce("data", ratios, min_size=1)
    text = replicated_step(update(tx, 0), 8).lower(grads).compile().as_text()
    permutes = [shape for shape, operation in collectives(text) if operation == "collective-permute"]
    assert len(permutes) == (7 - 4) + (7 - 2)
    description = sr.describe({name: jnp.zeros(80) for name in "abcd"}, 8, sr.SkipReduce("data", ratios, min_size=1))
    assert description.num_buckets == 2


def test_a_schedule_by_leaf_recompiles_nothing():
    tx = sr.skipreduce("data", {"a": ramp, "b": optax.linear_schedule(0.0, 0.5, 10)}, min_size=1)
    function = replicated_step(lambda grads, count: tx.update(grads, sr.SkipReduceState(count))[0], 8)
    grads = {"a": normal((8, 80)), "b": normal((8, 80))}
    for count in (0, 3, 6, 11):
        function(grads, jnp.int32(count))
    assert function._cache_size() == 1


def test_describe():
    params = {"a": jnp.zeros((64, 64)), "b": jnp.zeros((64, 8)), "c": jnp.zeros(4)}
    description = sr.describe(params, 8, skip_ratio={"a": 0.75, "b": ramp, "c": 0.0}, min_size=100)
    assert [leaf.num_skipped for leaf in description.leaves] == [6, 0, 0]
    assert (description.skip_ratio, description.num_skipped, description.count) == (None, 6, 0)
    assert "skip_ratio by leaf (at step 0 of the schedule): 0 to 6 of 7 reduce-scatter steps skipped" in str(
        description
    )
    later = sr.describe(params, 8, skip_ratio={"a": 0.75, "b": ramp, "c": 0.0}, min_size=100, count=9)
    assert [leaf.num_skipped for leaf in later.leaves] == [6, 6, 0]
    numbers = sr.describe(params, 8, skip_ratio={"a": 0.75, "b": 0.5, "c": 0.0})
    assert numbers.count is None


@pytest.mark.parametrize(
    ("ratios", "error", "message"),
    [
        ({"a": 1.0, "b": 0.5}, ValueError, r"skip_ratio=1.0 for 'a': expected a number in \[0, 1\)"),
        ({"a": "half", "b": 0.5}, TypeError, "skip_ratio='half' for 'a'"),
        ({}, TypeError, r"skip_ratio=\{\}: expected a number"),
    ],
)
def test_wrong_numbers_at_once(ratios, error, message):
    with pytest.raises(error, match=message):
        sr.skipreduce("data", ratios)


@pytest.mark.parametrize(
    ("ratios", "error", "message"),
    [
        ({"a": 0.5}, ValueError, "the pytree of ratios does not match the tree of gradients"),
        ({"a": 0.5, "b": None}, ValueError, "the pytree of ratios does not match the tree of gradients"),
        (lambda path, leaf: -1, ValueError, "skip_ratio=-1.0 for the leaf 'a'"),
        (lambda path, leaf: None, TypeError, "skip_ratio=None for the leaf 'a'"),
        ({"a": lambda count: 2.0, "b": 0.5}, ValueError, "skip_ratio=2.0 at step 0"),
    ],
)
def test_wrong_ratios_when_traced(ratios, error, message):
    grads = {"a": normal((4, 80)), "b": normal((4, 80))}
    tx = sr.skipreduce("data", ratios, min_size=1)
    with pytest.raises(error, match=message):
        replicated_step(update(tx), 4)(grads)


def test_one_schedule_is_one_bucket_and_many_are_many():
    grads = {name: normal((8, 80)) for name in "abcd"}
    params = {name: jnp.zeros(80) for name in "abcd"}
    shared = optax.linear_schedule(0.0, 0.5, 10)
    for ratios, num_buckets in (
        (lambda path, leaf: shared, 1),
        (lambda path, leaf: optax.linear_schedule(0.0, 0.5, 10), 4),
    ):
        tx = sr.skipreduce("data", ratios, min_size=1)
        text = replicated_step(update(tx, 0), 8).lower(grads).compile().as_text()
        assert sum(operation == "all-gather" for _, operation in collectives(text)) == num_buckets
        assert sr.describe(params, 8, sr.SkipReduce("data", ratios, min_size=1)).num_buckets == num_buckets
