import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._backends.choice import reduce_arrays
from jax_skipreduce._backends.reduction import Reduction
from jax_skipreduce._gradients.buckets import make_buckets
from jax_skipreduce._gradients.in_full import reduce_in_full
from jax_skipreduce._workers import blocks
from jax_skipreduce._workers.blocks import from_block, to_block
from jax_skipreduce._workers.group import Group
from tests.helpers import bits, collectives, count_collectives, data_mesh, each_worker, normal, replicated_step

shapes = st.lists(st.lists(st.integers(0, 6), max_size=3).map(tuple), max_size=6)
dtypes = st.sampled_from(["float32", "bfloat16", "complex64"])


@st.composite
def leaf_lists(draw):
    return [jax.ShapeDtypeStruct(shape, jnp.dtype(draw(dtypes))) for shape in draw(shapes)]


@settings(max_examples=50)  # each compiles
@given(st.lists(st.integers(0, 6), max_size=3).map(tuple), st.integers(1, 9))
def test_cutting_in_slices_is_undone(shape, num_workers):
    x = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape) + 1
    block = to_block(jnp.asarray(x), num_workers)
    assert block.shape == (num_workers, -(-x.size // num_workers))
    np.testing.assert_array_equal(np.asarray(block).reshape(-1)[x.size :], 0)
    np.testing.assert_array_equal(from_block(block, shape), x)


@given(leaf_lists(), st.integers(1, 600))
def test_every_leaf_is_in_one_bucket(leaves, bucket_bytes):
    indices = [i for i, leaf in enumerate(leaves) if leaf.size % 3]
    buckets = make_buckets(leaves, {i: leaves[i].dtype for i in indices}, bucket_bytes)
    assert sorted(i for bucket in buckets for i in bucket) == indices
    assert [bucket[0] for bucket in buckets] == sorted(bucket[0] for bucket in buckets)
    for bucket in buckets:
        assert len({leaves[i].dtype for i in bucket}) == 1
        sizes = [leaves[i].size * leaves[i].dtype.itemsize for i in bucket]
        assert len(bucket) == 1 or sum(sizes) <= bucket_bytes


@given(leaf_lists())
def test_buckets_are_no_smaller_than_they_need_to_be(leaves):
    buckets = make_buckets(leaves, {i: leaf.dtype for i, leaf in enumerate(leaves)}, 10**9)
    assert len(buckets) == len({leaf.dtype for leaf in leaves})


@settings(max_examples=25)  # each compiles
@given(leaf_lists().filter(bool), st.integers(1, 5))
def test_a_bucket_is_its_leaves_reduced_one_by_one(leaves, num_workers):
    leaves = [leaf for leaf in leaves if leaf.dtype == leaves[0].dtype and leaf.size]
    if not leaves:
        return
    values = [normal((num_workers, *leaf.shape), leaf.dtype, seed=i) for i, leaf in enumerate(leaves)]

    def reduce(values):
        reduction, group = Reduction(num_skipped=1 % num_workers, shift=2), Group.of("data")
        together = reduce_arrays(values, group, reduction)
        alone = [reduce_arrays([value], group, reduction)[0] for value in values]
        return together, alone

    together, alone = jax.jit(jax.vmap(reduce, axis_name="data"))(values)
    for value, one, other in zip(values, together, alone, strict=True):
        assert one.shape == value.shape
        assert one.dtype == value.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("least", [1, 1000, 2**40])  # all by themselves, some, none
def test_reduction_in_full_is_pmean_in_one_call(monkeypatch, least):
    monkeypatch.setattr(blocks, "_MIN_BYTES_LARGE", least)
    leaves = [
        *(normal((8,)), normal((8, 300)), normal((8, 4, 100), jnp.bfloat16), normal((8, 2, 3), jnp.bfloat16)),
        *(normal((8, 5)), normal((8, 2), jnp.int32), normal((8, 3)) > 0),
    ]

    def ours(values):
        return reduce_in_full(values, ("data",))

    def theirs(values):
        return [jax.lax.pmean(value, "data") for value in values]

    function = replicated_step(ours, 8)
    for one, other in zip(function(leaves), replicated_step(theirs, 8)(leaves), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    # XLA joins the operands of the call: one all-reduce for the floats, one for the integers.
    assert count_collectives(function, leaves) == {"all-reduce": 2}
    assert count_collectives(function, [leaves[1], leaves[0], leaves[4]]) == {"all-reduce": 1}


def test_short_leaves_are_one_operand():
    # Each operand is an all-reduce of its own over Gloo.
    leaves = [normal((8, 300)), normal((8, 20)), normal((8, 2**18))]
    function = replicated_step(lambda values: reduce_in_full(values, ("data",)), 8)
    ((shape, _),) = collectives(function.lower(leaves).compile().as_text())
    assert sorted(re.findall(r"f32\[\d+\]", shape)) == ["f32[262144]", "f32[320]"]


def test_nothing_to_reduce():
    assert replicated_step(lambda x: reduce_in_full([], ("data",)), 8)(normal((8, 1))) == []


@pytest.mark.parametrize("runner", ["shard_map", "vmap"])
@pytest.mark.parametrize(("num_skipped", "shift"), [(0, -1), (2, 0), (3, 5), (4, 1), (7, 2), (None, 3)])
def test_large_leaves_are_read_where_they_lie_and_nobody_can_tell(monkeypatch, runner, num_skipped, shift):
    # Small, large, small, large: what is large lies first in the bucket, and comes back in its own place.
    sizes = ((8, 30), (8, 401), (8, 7, 5), (8, 33, 16), (8, 100))
    leaves = [normal(size, seed=i) for i, size in enumerate(sizes)]
    results = {}
    for least in (1, 1000, 2**40):
        monkeypatch.setattr(blocks, "_MIN_BYTES_LARGE", least)

        def local(leaves, k, c):
            return reduce_arrays(
                leaves, Group.of("data"), Reduction(num_skipped=k if num_skipped is None else num_skipped, shift=c)
            )

        results[least] = each_worker(runner, local, 8)(leaves, 6, shift)
    for number, leaf in enumerate(leaves):
        alone = each_worker(
            runner,
            lambda x, c: sr.all_reduce(x, "data", num_skipped=6 if num_skipped is None else num_skipped, shift=c),
            8,
        )(leaf, shift)
        for least, result in results.items():
            assert bits(result[number]) == bits(alone), (least, number)


def test_no_bucket_waits_for_a_leaf_that_it_does_not_hold():
    """In the lowered program, what the first permute of each bucket depends on are the leaves of that bucket."""
    shapes = [1000, 1200, 1400, 1600]
    tx = sr.skipreduce("data", 0.5, min_size=1, bucket_bytes=1, mode="static", backend="xla")

    def reduce(grads):
        return tx.update(grads, sr.SkipReduceState(jnp.int32(0)))[0]

    grads = [normal((4, size), seed=size) for size in shapes]
    mapped = jax.shard_map(
        lambda grads: reduce([leaf[0] for leaf in grads]), mesh=data_mesh(4), in_specs=P("data"), out_specs=P()
    )
    (equation,) = [eqn for eqn in jax.make_jaxpr(mapped)(grads).eqns if eqn.primitive.name == "shard_map"]
    inner = equation.params["jaxpr"]
    depends = {variable: {i} for i, variable in enumerate(inner.invars)}
    order = []
    for eqn in inner.eqns:
        found = set().union(*(depends.get(v, set()) for v in eqn.invars if not hasattr(v, "val")))
        if eqn.primitive.name == "ppermute":
            order.append(found)
        depends |= dict.fromkeys(eqn.outvars, found)
    # One leaf each, the last one first: the backward pass has its gradient first.
    assert [min(found) for found in order] == [i for i in (3, 2, 1, 0) for _ in range(len(order) // 4)]
    assert all(len(found) == 1 for found in order)


def test_counts_of_collectives_are_unchanged():
    grads = {"a": normal((8, 65, 33)), "bias": normal((8, 7))}
    tx = sr.skipreduce("data", 0.5, backend="xla")
    run = each_worker("shard_map", lambda g: tx.update(g, sr.SkipReduceState(jnp.int32(3)))[0], 8)
    assert count_collectives(run, grads) == {"collective-permute": 3, "all-gather": 1, "all-reduce": 1}
