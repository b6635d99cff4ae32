import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._gradients import ratio as _ratio
from jax_skipreduce._gradients import shift as _shift
from tests.helpers import (
    bits,
    contributors,
    count_collectives,
    data_mesh,
    each_worker,
    expected_sum,
    normal,
    powers_of_two,
    replicated_step,
    update,
    with_runners,
)


def tree(num_workers=8, seed=0):
    """Stacked local gradients with everything a tree may hold."""
    return {
        "conv": {
            "kernel": normal((num_workers, 3, 3, 5, 7), seed=seed),
            "bias": normal((num_workers, 7), seed=seed + 1),
        },
        "dense": [normal((num_workers, 31, 33), jnp.bfloat16, seed=seed + 2), normal((num_workers,), seed=seed + 3)],
        "steps": normal((num_workers, 40), jnp.int32, seed=seed + 4),
        "flags": normal((num_workers, 3), seed=seed + 5) > 0,
        "nothing": None,
        "more": {},
        "empty": jnp.zeros((num_workers, 0, 7)),
    }


def assert_trees_close(one, other, **tolerance):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        np.testing.assert_allclose(np.float64(np.asarray(a)), np.float64(np.asarray(b)), **tolerance)


def double_precision_update(mode, normalize):
    """What one update makes of 2**r * (1 + 2**-40) on worker r, in float64 and complex128: float32 would lose the 1."""
    with jax.enable_x64(True):
        w = powers_of_two(8, 1024, np.float64) * (1 + 2.0**-40)
        grads = {"w": jnp.asarray(w), "c": jnp.asarray(w * (1 - 2j)), "h": jnp.asarray(powers_of_two(8, 64))}
        tx = sr.skipreduce("data", 0.5, mode=mode, normalize=normalize, min_size=0, seed=1)
        got = replicated_step(update(tx, count=2), 8)(grads)
    assert {name: leaf.dtype.name for name, leaf in got.items()} == {"w": "float64", "c": "complex128", "h": "float32"}
    return jax.tree.map(np.asarray, got)


def num_contributors(sums):
    return ((np.asarray(sums, np.int64)[:, None] >> np.arange(8)) & 1).sum(1)


@pytest.mark.parametrize("mode", ["random", "dropout"])
def test_double_precision(mode):
    skip, drop = (double_precision_update(mode, normalize) for normalize in ("skip", "drop"))
    for name, factor in (("w", 1 + 2.0**-40), ("c", (1 + 2.0**-40) * (1 - 2j)), ("h", 1)):
        # The bits of the sum name the workers that are in it, to the last digit of float64.
        sums = np.round(np.real(skip[name]) * 8)
        np.testing.assert_array_equal(skip[name], sums * factor / 8)
        num = num_contributors(sums)
        if mode == "random":
            assert any((expected_sum(8, 4, shift, len(sums) // 8) == sums).all() for shift in range(8))
        else:
            # Each element by itself: surely of one worker, and of each of seven others with probability 1/2.
            assert num.min() >= 1
            tolerance = 5 * np.sqrt(7 * 0.25 / len(sums))
            assert abs(num.mean() - (1 + 7 / 2)) < tolerance
        eps = {"w": 1e-15, "c": 1e-15, "h": 1e-6}[name]
        np.testing.assert_allclose(drop[name], sums * factor / num, rtol=eps)
    # The same slices are skipped as without.
    if mode == "random":
        tx = sr.skipreduce("data", 0.5, min_size=0, seed=1, bucket_bytes=1)
        without = replicated_step(update(tx, count=2), 8)({"h": jnp.asarray(powers_of_two(8, 64))})
        with jax.enable_x64(True):
            again = replicated_step(update(tx, count=2), 8)({"h": jnp.asarray(powers_of_two(8, 64))})
        assert bits(again["h"]) == bits(without["h"])


def test_dropout_favours_no_worker():
    num_steps = 1500
    tx = sr.skipreduce("data", 0.5, mode="dropout", min_size=0)

    def local(grads):
        return lax.map(lambda count: tx.update(grads, sr.SkipReduceState(count))[0], jnp.arange(num_steps))

    sums = np.asarray(jax.jit(jax.vmap(local, axis_name="data"))({"w": powers_of_two(8, 8)})["w"][0] * 8, np.int64)
    share = ((sums[:, :, None] >> np.arange(8)) & 1).mean(0)
    # Each contributes with probability 1/2, but surely where it comes first, which is one time in eight.
    assert np.abs(share - (0.5 + 0.5 / 8)).max() < 5 * np.sqrt(0.25 / num_steps)


@pytest.mark.parametrize(
    ("runner", "case"),
    with_runners([*itertools.product(("static", "dropout"), (0, 100)), ("random", 100), ("random", 0)]),
    ids=str,
)
def test_nothing_skipped_is_pmean(runner, case):
    mode, min_size = case
    grads = tree()
    ours = each_worker(runner, update(sr.skipreduce("data", 0.0, mode=mode, min_size=min_size)), 8)(grads)
    theirs = each_worker(runner, lambda g: jax.tree.map(lambda x: lax.pmean(x, "data"), g), 8)(grads)
    assert_trees_close(ours, theirs, atol=0.02, rtol=0)
    for name in ("conv", "steps", "flags"):
        for a, b in zip(jax.tree.leaves(ours[name]), jax.tree.leaves(theirs[name]), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)
            if name != "conv":
                assert bits(a) == bits(b)


@pytest.mark.parametrize(("runner", "num_workers"), with_runners([1, 2, 3, 8]))
def test_contributors_of_a_leaf(runner, num_workers):
    # Two leaves of one bucket: each is cut in N slices of its own, with the contributors of the paper.
    grads = {"a": powers_of_two(num_workers, 3 * num_workers), "b": powers_of_two(num_workers, num_workers)}
    for ratio in (0.0, 0.5, 0.9):
        tx = sr.skipreduce("data", ratio, min_size=0, seed=5)
        k = _ratio.num_steps_of(ratio, num_workers)
        got = each_worker(runner, update(tx, count=7), num_workers)(grads)
        shift = int(_shift.random_shifts(5, jnp.int32(7), 1, num_workers)[0]) if k else 0
        for name, slice_size in (("a", 3), ("b", 1)):
            expected = expected_sum(num_workers, k, shift, slice_size) / np.float32(num_workers)
            np.testing.assert_array_max_ulp(np.asarray(got[name][0]), expected, maxulp=1)


@pytest.mark.parametrize(
    ("runner", "case"),
    [
        *with_runners([("random", "drop"), ("static", "skip"), ("dropout", "drop"), ("random", "skip")]),
        *(("shard_map_unchecked", ("dropout", "drop")), ("pmap", ("dropout", "drop"))),
    ],
    ids=str,
)
def test_all_ways_to_run_give_the_same_bits_on_all_workers(runner, case):
    mode, normalize = case
    grads = tree()
    tx = sr.skipreduce("data", 0.5, mode=mode, normalize=normalize, min_size=100, bucket_bytes=3000)
    got = each_worker(runner, update(tx, count=3), 8)(grads)
    reference = each_worker("vmap", update(tx, count=3), 8)(grads)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(reference), strict=True):
        if a.size:
            assert len({bits(row) for row in a}) == 1
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-6)


leaves = st.builds(
    lambda shape, dtype, seed: normal((2, *shape), jnp.dtype(dtype), seed),
    st.lists(st.integers(0, 5), max_size=3),
    st.sampled_from(["float32", "float32", "float16", "complex64", "int32"]),
    st.integers(0, 99),
)
trees = st.recursive(
    st.none() | leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(max_examples=20)  # each compiles
@given(trees, st.integers(1, 200), st.sampled_from([0, 4, 1024]))
def test_any_tree_goes_through_buckets_and_back(grads, bucket_bytes, min_size):
    tx = sr.skipreduce("data", 0.0, bucket_bytes=bucket_bytes, min_size=min_size)
    got = jax.vmap(update(tx), axis_name="data", axis_size=2)(grads)
    expected = jax.vmap(lambda g: lax.pmean(g, "data"), axis_name="data", axis_size=2)(grads)
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    for one, other, before in zip(*map(jax.tree.leaves, (got, expected, grads)), strict=True):
        assert one.shape == before.shape
        if one.size:
            # A sum of two is the same in any order, so not even a bit differs.
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_buckets_and_steps_have_shifts_of_their_own():
    leaves = {name: powers_of_two(8, 8) for name in "abcd"}

    def patterns(**settings):
        tx = sr.skipreduce("data", 0.5, min_size=0, bucket_bytes=32, **settings)
        run = replicated_step(lambda g, count: tx.update(g, sr.SkipReduceState(count))[0], 8)
        return [[bits(run(leaves, count)[name]) for name in "abcd"] for count in range(12)]

    random = patterns()
    assert all(len(set(column)) > 1 for column in zip(*random, strict=True))
    assert any(len(set(row)) > 1 for row in random)
    assert random == patterns()
    assert random != patterns(seed=1)
    static = patterns(mode="static")
    assert len({pattern for row in static for pattern in row}) == 1
    expected = np.asarray([sum(2.0**r for r in contributors(j, 8, 4)) / 8 for j in range(8)], np.float32)
    assert static[0][0] == bits(expected)


def test_over_many_steps_every_worker_contributes_to_every_slice_equally_often():
    num_steps = 2000
    tx = sr.skipreduce("data", 0.5, min_size=0, bucket_bytes=32)
    grads = {"a": powers_of_two(8, 8), "b": powers_of_two(8, 8)}

    def local(grads):
        def step(state, _):
            reduced, state = tx.update(grads, state)
            return state, reduced

        return lax.scan(step, tx.init(grads), None, length=num_steps)

    state, reduced = jax.jit(jax.vmap(local, axis_name="data"))(grads)
    np.testing.assert_array_equal(state.num_reductions, num_steps)
    for name in "ab":
        sums = np.asarray(reduced[name][0] * 8, np.int64)
        share = ((sums[:, :, None] >> np.arange(8)) & 1).mean(axis=0)  # (slice, worker)
        assert np.abs(share - 0.5).max() < 5 * np.sqrt(0.25 / num_steps)


def test_protected_leaves_are_pmean_to_the_bit():
    grads = tree()
    theirs = replicated_step(lambda g: jax.tree.map(lambda x: lax.pmean(x, "data"), g), 8)(grads)
    for protect in (
        sr.by_path("^conv/"),
        lambda path, leaf: leaf.ndim == 4,
        {**dict.fromkeys(grads, False), "conv": True, "nothing": None, "more": {}},
    ):
        got = replicated_step(update(sr.skipreduce("data", 0.5, protect=protect, min_size=100)), 8)(grads)
        assert bits(got["conv"]["kernel"]) == bits(theirs["conv"]["kernel"])
        assert bits(got["conv"]["bias"]) == bits(theirs["conv"]["bias"])  # small
        assert bits(got["dense"][0]) != bits(theirs["dense"][0])
    with pytest.raises(ValueError, match="protect: the mask does not match"):
        replicated_step(update(sr.skipreduce("data", protect={"conv": True})), 8)(grads)


def test_integers_flags_and_empty_leaves():
    grads = tree()
    got = replicated_step(update(sr.skipreduce("data", 0.5, min_size=0)), 8)(grads)
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    theirs = replicated_step(lambda g: lax.pmean((g["steps"], g["flags"]), "data"), 8)(grads)
    assert bits((got["steps"], got["flags"])[0]) == bits(theirs[0])
    assert bits(got["flags"]) == bits(theirs[1])
    assert got["empty"].shape == (0, 7)

    def with_integer_params(x):
        params = {"w": jnp.ones(5), "n": jnp.int32(3)}
        loss = lambda p, x: jnp.sum(p["w"] * x)  # noqa: E731
        grads = jax.grad(loss, allow_int=True)(sr.local_params(params, "data"), x)
        reduced = update(sr.skipreduce("data", min_size=0))(grads)
        assert reduced["n"].dtype == jax.dtypes.float0
        return reduced["w"]

    assert replicated_step(with_integer_params, 8)(normal((8, 5))).shape == (5,)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 5, 8, 12])
def test_number_of_steps_skipped(num_workers):
    traced = jax.jit(functools.partial(_ratio.num_steps_of, num_workers=num_workers))
    for ratio in np.linspace(0, 0.999, 61):
        k = _ratio.num_steps_of(ratio, num_workers)
        assert 0 <= k <= num_workers - 1
        assert abs(k - ratio * num_workers) <= 0.5 + 1e-5 or k == num_workers - 1
        assert int(traced(jnp.float32(ratio))) == k


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75])
def test_a_leaf_of_a_bucket_is_what_all_reduce_makes_of_it(ratio):
    # Where each element is, too: with 2**r in every element, slices could be mixed up unseen.
    grads = {"a": normal((8, 5, 7)), "b": normal((8, 50), seed=1), "c": normal((8, 3), seed=2)}
    tx = sr.skipreduce("data", ratio, min_size=0, seed=5)
    got = replicated_step(update(tx, count=7), 8)(grads)
    shift = int(_shift.random_shifts(5, jnp.int32(7), 1, 8)[0])
    for name, leaf in grads.items():
        alone = replicated_step(lambda x, c: sr.all_reduce(x, "data", num_skipped=int(8 * ratio), shift=c), 8)
        assert bits(got[name]) == bits(alone(leaf, shift))


def test_a_schedule_warms_up_without_recompilation():
    schedule = optax.join_schedules([optax.constant_schedule(0.0), optax.constant_schedule(0.5)], [3])
    grads = {"w": powers_of_two(8, 8)}
    tx = sr.skipreduce("data", schedule, min_size=0)
    run = replicated_step(lambda g, state: tx.update(g, state), 8)
    state, num_contributors = tx.init(grads), []
    for _ in range(6):
        reduced, state = run(grads, state)
        num_contributors.append({bin(int(value * 8)).count("1") for value in reduced["w"]})
    assert num_contributors == [{8}, {8}, {8}, {4}, {4}, {4}]
    assert int(state.num_reductions) == 6
    # Where the schedule says 0.5, it is what the number 0.5 gives.
    fixed = replicated_step(update(sr.skipreduce("data", 0.5, min_size=0), count=4), 8)(grads)
    assert bits(fixed["w"]) == bits(replicated_step(update(tx, count=4), 8)(grads)["w"])


def mlp_loss(params, x):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((hidden @ params["w2"] - 1.0) ** 2)


def mlp_params():
    return {
        "w1": normal((10, 128), seed=1) / 3,
        "b1": jnp.zeros(128),
        "w2": normal((128, 10), seed=2) / 10,
    }


def train(tx, num_steps, num_workers=8, state=None, params=None, check_vma=True, mesh=None):
    """The training loop of the README, on parameters that lie where it leaves them."""
    mesh = mesh or data_mesh(num_workers)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P(), P()), check_vma=check_vma
    )
    def train_step(params, opt_state, batch):
        loss, grads = sr.local_value_and_grad(mlp_loss, "data")(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, "data")

    replicated = NamedSharding(mesh, P())
    params = jax.device_put(mlp_params() if params is None else params, replicated)
    state = jax.device_put(tx.init(params) if state is None else state, replicated)
    batch = jax.device_put(normal((64, 10), seed=3), NamedSharding(mesh, P("data")))
    for _ in range(num_steps):
        params, state, loss = train_step(params, state, batch)
    return params, state, loss, train_step


@pytest.mark.promotes
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("ratio", [0.5, optax.linear_schedule(0.0, 0.9, 10)])
def test_training_compiles_once_and_learns(ratio, check_vma):
    tx = optax.chain(sr.skipreduce("data", ratio), optax.adam(1e-2))
    _, state, loss, train_step = train(tx, 30, check_vma=check_vma)
    assert train_step._cache_size() == 1
    assert int(state[0].num_reductions) == 30
    assert state[0].num_reductions.dtype == jnp.int32
    assert float(loss) < 0.5 * float(mlp_loss(mlp_params(), normal((64, 10), seed=3)))


@pytest.mark.promotes
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_training_with_a_mesh_that_is_set(axis_type):
    tx = optax.chain(sr.skipreduce("data", optax.linear_schedule(0.0, 0.5, 4)), optax.adam(1e-2))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        params, *_ = train(tx, 5, mesh=mesh)
    expected, *_ = train(tx, 5)
    assert [bits(x) for x in jax.tree.leaves(params)] == [bits(x) for x in jax.tree.leaves(expected)]


@pytest.mark.promotes
def test_full_reduction_is_data_parallel_training():
    ours, *_ = train(optax.chain(sr.skipreduce("data", 0.0), optax.adam(1e-2)), 20)
    params, tx = mlp_params(), optax.adam(1e-2)
    state, batch = tx.init(params), normal((64, 10), seed=3)

    @jax.jit
    def step(params, state):
        updates, state = tx.update(jax.grad(mlp_loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

    for _ in range(20):
        params, state = step(params, state)
    assert_trees_close(ours, params, atol=2e-4, rtol=0)


def test_weak_types_do_not_recompile():
    tx = sr.skipreduce("data", 0.5, min_size=2)

    @jax.jit
    def step(x, state):
        def local(x, state):
            weak = lax.pcast(jnp.asarray(1.0), "data", to="varying")
            return tx.update({"w": x[0], "weak": weak}, state)

        return jax.shard_map(local, mesh=data_mesh(8), in_specs=(P("data"), P()), out_specs=P())(x, state)

    mesh = data_mesh(8)
    x = jax.device_put(normal((8, 16)), NamedSharding(mesh, P("data")))
    state = jax.device_put(tx.init(None), NamedSharding(mesh, P()))
    for _ in range(3):
        reduced, state = step(x, state)
    assert step._cache_size() == 1
    assert not state.num_reductions.weak_type
    np.testing.assert_allclose(reduced["weak"], 1.0)


@pytest.mark.promotes
def test_state_restores_at_another_number_of_workers(tmp_path):
    tx = optax.chain(sr.skipreduce("data", 0.5), optax.adam(1e-2))
    params, state, _, _ = train(tx, 4)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "step4", {"params": params, "state": state})
    checkpointer.wait_until_finished()

    for num_workers in (8, 4):
        there = NamedSharding(data_mesh(num_workers), P())
        target = jax.tree.map(
            lambda x, there=there: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there),
            {"params": params, "state": tx.init(params)},
        )
        restored = checkpointer.restore(tmp_path / "step4", target)
        assert int(restored["state"][0].num_reductions) == 4
        on_params, on_state, _, _ = train(tx, 3, num_workers, state=restored["state"], params=restored["params"])
        assert int(on_state[0].num_reductions) == 7
        if num_workers == 8:
            expected, *_ = train(tx, 7)
            assert [bits(x) for x in jax.tree.leaves(on_params)] == [bits(x) for x in jax.tree.leaves(expected)]
    checkpointer.close()


def test_counter_stays_at_the_largest_integer():
    tx = sr.skipreduce("data", 0.5)
    largest = sr.SkipReduceState(jnp.int32(np.iinfo(np.int32).max))
    state = replicated_step(lambda g: tx.update(g, largest)[1], 8)({"w": normal((8, 8))})
    assert int(state.num_reductions) == np.iinfo(np.int32).max


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_tuples_of_axes(names):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    tx = sr.skipreduce(names, 0.5, mode="static", min_size=0)
    run = jax.jit(
        jax.shard_map(
            lambda g: update(tx)(jax.tree.map(lambda x: x[0], g)), mesh=mesh, in_specs=P(("a", "b")), out_specs=P()
        )
    )
    got = run({"w": powers_of_two(8, 16)})
    np.testing.assert_array_equal(got["w"] * 8, expected_sum(8, 4, 0, 2))


def test_leaves_that_vary_over_another_axis_do_not_touch_those_that_do_not():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = sr.skipreduce("data", 0.5, min_size=0)

    def local(shared, sharded):
        grads = {
            "shared": lax.pcast(shared, "data", to="varying"),
            "sharded": lax.pcast(sharded, "data", to="varying"),
            "bias": lax.pcast(sharded[0], "data", to="varying"),
        }
        return update(tx)(grads)

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(P(), P(None, "model")),
            out_specs={"shared": P(), "sharded": P(None, "model"), "bias": P("model")},
        )
    )
    got = run(jnp.ones((8, 8)), jnp.ones((8, 8)))
    assert {name: leaf.shape for name, leaf in got.items()} == {"shared": (8, 8), "sharded": (8, 8), "bias": (8,)}


def test_wire_steps_of_an_update():
    grads = {"a": normal((8, 64, 64)), "b": normal((8, 50, 64)), "bias": normal((8, 64)), "scale": normal((8,))}
    for ratio, k in ((0.0, 0), (0.5, 4), (0.99, 7)):
        counts = count_collectives(replicated_step(update(sr.skipreduce("data", ratio)), 8), grads)
        # One ring for both matrices, one all-reduce for the rest.
        expected = {"collective-permute": 7 - k, "all-gather": 1, "all-reduce": 1}
        assert counts == {name: count for name, count in expected.items() if count}


def test_works_with_optax_wrappers_that_pass_extra_arguments():
    tx = optax.with_extra_args_support(optax.chain(sr.skipreduce("data", 0.0), optax.scale(-1.0)))
    got = replicated_step(lambda g: tx.update(g, tx.init(g), value=1.0)[0], 8)({"w": normal((8, 16))})
    np.testing.assert_allclose(got["w"], -normal((8, 16)).mean(0), atol=1e-6)
