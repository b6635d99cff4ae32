"""importance() against NumPy, and its running average."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._importance import importance as _importance
from jax_skipreduce._importance.average import ImportanceState, track_importance
from jax_skipreduce._importance.importance import importance
from tests.helpers import RUNNERS, bits, collectives, count_collectives, data_mesh, each_worker, normal, replicated_step


def oracle(grads, top_fraction=0.25):
    """The definition, in NumPy: by the value at the border, ties sharing what is left, zeros never."""
    leaves = [np.abs(np.asarray(leaf).astype(np.complex128)).ravel() for leaf in jax.tree.leaves(grads)]
    whole = np.concatenate(leaves)
    wanted = max(1, round(top_fraction * whole.size))
    threshold = np.partition(whole, whole.size - wanted)[whole.size - wanted]
    larger, ties = np.sum(whole > threshold), np.sum(whole == threshold)
    credit = (wanted - larger) / ties if threshold > 0 else 0.0
    return [(np.sum(leaf > threshold) + credit * np.sum(leaf == threshold)) / leaf.size for leaf in leaves]


def check(shares, grads, top_fraction=0.25):
    assert jax.tree.structure(shares) == jax.tree.structure(grads)
    for share in jax.tree.leaves(shares):
        assert share.dtype == jnp.float32
        assert share.shape == ()
    np.testing.assert_allclose(jax.tree.leaves(shares), oracle(grads, top_fraction), rtol=1e-6)


def make_grads(dtype=jnp.float32, seed=0):
    """Leaves of odd sizes, of which some are far larger than others."""
    shapes = {"conv": (3, 3, 5, 7), "dense": [(101, 37), (37,)], "scale": (), "head": (1, 1)}
    scales = iter([5.0, 0.1, 1.0, 3.0, 20.0])
    seeds = iter(range(seed, seed + 5))
    return jax.tree.map(
        lambda shape: (normal(shape, jnp.float32, next(seeds)) * next(scales)).astype(dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


@pytest.mark.parametrize("top_fraction", [1e-9, 0.01, 0.25, 0.5, 1.0, np.float32(0.25), 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_is_that_of_numpy(dtype, top_fraction):
    grads = make_grads(dtype)
    check(importance(grads, top_fraction), grads, top_fraction)


def test_other_dtypes():
    mixed = {"a": normal((50, 3), jnp.bfloat16), "b": normal((77,), jnp.float16, 1), "c": normal((91,), jnp.float32, 2)}
    check(jax.jit(importance)(mixed), mixed)
    complex_grads = {"a": normal((50, 3), jnp.complex64), "b": 0.1 * normal((77,), jnp.complex64, 3)}
    shares = importance(complex_grads)
    # The two round absolute values differently, which may put one element on the other side.
    np.testing.assert_allclose([shares["a"], shares["b"]], oracle(complex_grads), atol=2 / 150)
    with jax.enable_x64(True):
        wide = {"a": np.random.default_rng(0).normal(size=200), "b": 0.2 * np.random.default_rng(1).normal(size=100)}
        check(importance(jax.tree.map(jnp.asarray, wide)), wide)


def test_ties_share_what_is_left():
    grads = {"a": jnp.array([3.0, -2.0, 2.0, 1.0]), "b": jnp.array([2.0, 0.0, 1.0, -1.0, 0.5, 0.0])}
    shares = importance(grads, 0.2)  # two of ten: the 3, and one of three 2s
    np.testing.assert_allclose([shares["a"], shares["b"]], [(1 + 2 / 3) / 4, (1 / 3) / 6], rtol=1e-6)
    # In whatever order.
    turned = importance(jax.tree.map(lambda leaf: -leaf[::-1], grads), 0.2)
    assert bits(turned["a"]) == bits(shares["a"])
    np.testing.assert_array_equal(list(importance({"a": jnp.full(7, -2.0), "b": jnp.full(93, 2.0)}).values()), 0.25)


@hypothesis.given(
    st.lists(st.integers(-4, 4), min_size=12, max_size=12),
    st.sampled_from([1, 5, 11]),
    st.floats(0.001, 1),
    st.booleans(),
)
def test_any_values(values, cut, top_fraction, is_tiny):
    # Subnormal numbers, which XLA takes for zeros when it computes with them.
    scaled = np.asarray(values, np.float32) * np.float32(1e-42 if is_tiny else 0.75)
    grads = [scaled[:cut], scaled[cut:]]
    shares = importance(grads, top_fraction)
    np.testing.assert_allclose(shares, oracle(grads, top_fraction), rtol=1e-6)
    important = sum(float(share) * part.size for share, part in zip(shares, grads, strict=True))
    assert important <= max(1, round(top_fraction * len(values))) + 1e-4


def test_zeros_are_never_important():
    zeros = {"a": jnp.zeros(8), "b": -jnp.zeros((4, 3), jnp.bfloat16)}
    assert [float(share) for share in jax.tree.leaves(importance(zeros, 1.0))] == [0, 0]
    # Fewer than the wanted are not zero, as in an embedding: those alone are important.
    mostly = {"rows": jnp.zeros((100, 4)).at[3].set(1e-30), "rest": jnp.zeros(100)}
    shares = importance(mostly, 0.5)
    np.testing.assert_allclose([shares["rows"], shares["rest"]], [4 / 400, 0])


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
def test_all_are_nan_where_one_element_is_not_finite(value):
    grads = make_grads()
    grads["conv"] = grads["conv"].at[0, 1, 2, 3].set(value)
    assert np.isnan(jax.tree.leaves(importance(grads))).all()
    largest = {"a": jnp.full(3, jnp.finfo(jnp.float32).max), "b": jnp.ones(9)}
    check(importance(largest), largest)


def test_what_is_not_ranked():
    grads = {
        "w": jnp.array([1.0, 2.0, 3.0, 4.0]),
        "n": jnp.full(9, 100, jnp.int32),
        "none": None,
        "no": jnp.zeros((0, 3)),
    }
    shares = importance(grads)
    assert jax.tree.structure(shares) == jax.tree.structure(grads)
    assert (float(shares["w"]), float(shares["n"]), float(shares["no"])) == (0.25, 0, 0)
    float0 = jax.grad(lambda p: p["w"] * 2.0, allow_int=True)({"w": 1.0, "n": 3})
    assert {name: float(share) for name, share in importance(float0).items()} == {"w": 1, "n": 0}
    assert importance({}) == {}
    assert importance({"n": jnp.arange(3)})["n"].dtype == jnp.float32
    # A single number is the largest.
    assert float(importance(jnp.float32(-3.0), 0.01)) == 1


def test_compiles_once():
    run = jax.jit(lambda grads: importance(grads))
    for seed in range(3):
        grads = make_grads(seed=seed)
        check(run(grads), grads)
    assert run._cache_size() == 1


@pytest.mark.parametrize("num_workers", [1, 3, 8])
@pytest.mark.parametrize("runner", RUNNERS)
def test_of_one_worker_and_of_all(runner, num_workers):
    # Workers differ in which leaf is large.
    x = {
        "a": normal((num_workers, 13, 7)) * (1 + jnp.arange(num_workers, dtype=jnp.float32))[:, None, None],
        "b": 2 * normal((num_workers, 31), jnp.float32, 1),
    }
    rows = [oracle(jax.tree.map(lambda leaf, rank=rank: leaf[rank], x)) for rank in range(num_workers)]
    own = each_worker(runner, importance, num_workers)(x)
    np.testing.assert_allclose(np.stack(jax.tree.leaves(own), axis=1), rows, rtol=1e-6)
    mean = each_worker(runner, lambda g: importance(g, axis_name="data"), num_workers)(x)
    for leaf, expected in zip(jax.tree.leaves(mean), np.mean(rows, axis=0), strict=True):
        np.testing.assert_allclose(leaf, np.full(num_workers, expected), rtol=1e-6)
        assert len({bits(value) for value in np.asarray(leaf)}) == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_bytes_on_the_wire(check_vma):
    x = {"a": normal((8, 130, 7)), "b": normal((8, 31)), "c": normal((8, 2), jnp.bfloat16)}
    average = replicated_step(lambda g: importance(g, axis_name="data"), 8, check_vma)
    # Leaves shard_map as P().
    assert collectives(average.lower(x).compile().as_text()) == [("f32[3]{0}", "all-reduce")]
    assert count_collectives(each_worker("shard_map", importance, 8), x) == {}
    # NaN on one worker is noticed on all.
    x["b"] = x["b"].at[5, 0].set(jnp.nan)
    assert np.isnan(jax.tree.leaves(average(x))).all()


def of_many(compiled_text):
    """The collectives that move more than counters."""
    moved = []
    for shape, operation in collectives(compiled_text):
        sizes = [part.split("]")[0] for part in shape.split("[")[1:]]
        if operation != "all-reduce" or any(math.prod(int(n) for n in size.split(",") if n) > 8 for size in sizes):
            moved.append((shape, operation))
    return moved


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_stacked", [False, True])
def test_sharded_arrays_stay_where_they_are(axis_type, is_stacked):
    """In pjit programs, also with gradients that are stacked by worker."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    rows, leading = ((4,), ("data",)) if is_stacked else ((), ())
    grads = {
        "up": normal((*rows, 16, 32)),
        "down": 3 * normal((*rows, 32, 12), jnp.bfloat16, 1),
        "b": normal((*rows, 5)),
    }
    specs = {"up": P(*leading, None, "model"), "down": P(*leading, "model"), "b": P(*leading)}
    placed = {name: jax.device_put(leaf, NamedSharding(mesh, specs[name])) for name, leaf in grads.items()}
    with jax.set_mesh(mesh):
        run = jax.jit(importance)
        assert of_many(run.lower(placed).compile().as_text()) == []
        check(run(placed), grads)


def test_model_axis_that_is_not_manual():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    grads = {"up": normal((4, 16, 32)), "b": normal((4, 7))}
    placed = {"up": jax.device_put(grads["up"], NamedSharding(mesh, P("data", None, "model"))), "b": grads["b"]}
    run = jax.jit(
        jax.shard_map(
            lambda g: importance(jax.tree.map(lambda leaf: leaf[0], g), axis_name="data"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            axis_names={"data"},
        )
    )
    rows = [oracle(jax.tree.map(lambda leaf, rank=rank: leaf[rank], grads)) for rank in range(4)]
    np.testing.assert_allclose(jax.tree.leaves(run(placed)), np.mean(rows, axis=0), rtol=1e-6)
    assert of_many(run.lower(placed).compile().as_text()) == []


def test_more_elements_than_an_int32_counts(monkeypatch):
    """Counted in two parts, here from 100 elements on."""
    monkeypatch.setattr(_importance, "_MAX_COUNT", 100)
    monkeypatch.setattr(_importance, "_LIMB_BITS", 4)
    grads = {"a": 4 * normal((9, 31, 2)), "b": normal((203, 5), jnp.float32, 1), "c": normal((300,), jnp.float32, 2)}
    check(importance(grads), grads)
    monkeypatch.undo()
    shapes = {
        "layers": jax.ShapeDtypeStruct((80, 8192, 28672), jnp.bfloat16),
        "embedding": jax.ShapeDtypeStruct((2**17, 8192), jnp.bfloat16),
    }
    assert jax.eval_shape(importance, shapes)["layers"].shape == ()
    high, low = _importance._carried(jnp.int32(0), jnp.int32(2**31 - 1))
    assert (int(high) << 10) + int(low) == 2**31 - 1


def test_wrong_arguments():
    grads = {"w": jnp.ones(4)}
    for value in (0, -0.25, 1.5, np.nan):
        with pytest.raises(ValueError, match=rf"top_fraction={value}: expected a number in \(0, 1\]"):
            importance(grads, value)
    for value in ("0.25", True, None):
        with pytest.raises(TypeError, match=r"top_fraction=.*expected a number"):
            importance(grads, value)
    with pytest.raises(TypeError, match="top_fraction="):
        jax.jit(importance)(grads, 0.25)
    with pytest.raises(ValueError, match="axis_name='data': no axis 'data' is bound here"):
        importance(grads, axis_name="data")
    with pytest.raises(TypeError, match=r"leaf 'w' is 1.0 \(float\): expected an array"):
        importance({"w": 1.0})
    with pytest.raises(TypeError, match="leaf 'w' has dtype float8_e4m3fn"):
        importance({"w": jnp.ones(4, jnp.float8_e4m3fn)})


# The running average.


def samples(num_steps, num_workers=None):
    rows = () if num_workers is None else (num_workers,)
    return [{"a": normal((*rows, 40), seed=i), "b": 2 * normal((*rows, 9), seed=100 + i)} for i in range(num_steps)]


def averages_of(tx, grads):
    state = tx.init(grads[0])
    step = jax.jit(tx.update)
    for each in grads:
        updates, state = step(each, state)
        assert bits(updates["a"]) == bits(each["a"])
    assert step._cache_size() == 1
    return state


@pytest.mark.parametrize("every", [1, 3])
def test_average_is_the_mean_at_first(every):
    grads = samples(7)
    state = averages_of(track_importance(every=every), grads)
    assert int(state.count) == 7
    assert int(state.num_averaged) == len(grads[::every])
    expected = np.mean([oracle(each) for each in grads[::every]], axis=0)
    np.testing.assert_allclose(jax.tree.leaves(state.importance), expected, rtol=1e-5)


def test_average_forgets():
    grads = samples(6)
    state = averages_of(track_importance(decay=0.5, top_fraction=0.1), grads)
    expected = np.asarray(oracle(grads[0], 0.1))
    for each in grads[1:]:
        expected = (expected + oracle(each, 0.1)) / 2
    np.testing.assert_allclose(jax.tree.leaves(state.importance), expected, rtol=1e-5)
    last = averages_of(track_importance(decay=0), grads)
    np.testing.assert_allclose(jax.tree.leaves(last.importance), oracle(grads[-1]), rtol=1e-6)
    assert jax.tree.leaves(averages_of(track_importance(decay=1), [{"n": jnp.arange(3), "a": jnp.zeros(3)}] * 2)) == [
        2,
        2,
        0,
        0,
    ]


def test_average_leaves_out_what_is_not_finite():
    grads = samples(4)
    broken = [grads[0], {**grads[1], "b": grads[1]["b"].at[2].set(jnp.nan)}, grads[2], grads[3]]
    state = averages_of(track_importance(), broken)
    assert (int(state.count), int(state.num_averaged)) == (4, 3)
    expected = np.mean([oracle(each) for each in (grads[0], grads[2], grads[3])], axis=0)
    np.testing.assert_allclose(jax.tree.leaves(state.importance), expected, rtol=1e-5)
    none = averages_of(track_importance(), [broken[1]])
    assert [float(share) for share in jax.tree.leaves(none.importance)] == [0, 0]


@pytest.mark.promotes
@pytest.mark.parametrize(("check_vma", "every"), [(True, 1), (True, 2), (False, 2)])
def test_before_skipreduce(check_vma, every):
    """The state is the same on all workers, and what is reduced is what it would be without."""
    tracked = optax.chain(track_importance("data", every=every), sr.skipreduce("data", 0.5, min_size=0), optax.sgd(1.0))
    plain = optax.chain(sr.skipreduce("data", 0.5, min_size=0), optax.sgd(1.0))
    steps = samples(3, 4)
    results = []
    for tx in (tracked, plain):
        run = replicated_step(lambda g, state, tx=tx: tx.update(g, state), 4, check_vma)
        state = tx.init(jax.tree.map(lambda leaf: leaf[0], steps[0]))
        state = jax.device_put(state, NamedSharding(data_mesh(4), P()))  # as it comes back: one compilation
        for grads in steps:
            updates, state = run(grads, state)
        results.append((updates, state))
    assert bits(results[0][0]["a"]) == bits(results[1][0]["a"])
    shares = optax.tree_utils.tree_get(results[0][1], "importance")
    rows = [oracle({k: v[rank] for k, v in each.items()}) for each in steps[::every] for rank in range(4)]
    np.testing.assert_allclose(jax.tree.leaves(shares), np.mean(rows, axis=0), rtol=1e-5)


@pytest.mark.promotes
def test_before_skipreduce_in_pjit_programs():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = optax.chain(track_importance(), sr.skipreduce("data", 0.5, mesh=mesh, min_size=0), optax.sgd(1.0))
    (grads,) = samples(1, 4)
    params = jax.tree.map(lambda leaf: leaf[0], grads)
    updates, state = jax.jit(tx.update)(grads, tx.init(params), params)
    assert updates["a"].shape == (40,)
    np.testing.assert_allclose(jax.tree.leaves(state[0].importance), oracle(grads), rtol=1e-6)


def test_gradients_that_differ_need_the_axis():
    (grads,) = samples(1, 8)
    tx = track_importance()
    with pytest.raises(
        ValueError, match=r"axis_name=None: the importance of 'a' differs along 'data'.*track_importance\('data'\)"
    ):
        replicated_step(lambda g: tx.update(g, tx.init(g))[1], 8)(grads)


def test_shards_over_a_model_axis_that_is_manual():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    grads = {"w": normal((4, 6, 10)), "v": 2 * normal((4, 8), seed=1)}

    def run(axis_name):
        tx = track_importance(axis_name)
        step = lambda g: tx.update(g, tx.init(g))[1].importance  # noqa: E731
        specs = {"w": P("data", None, "model"), "v": P("data", "model")}
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=P()))(grads)

    with pytest.raises(ValueError, match="axis_name='data': the importance of 'v' differs along 'model'"):
        run("data")
    shards = [
        oracle({"v": grads["v"][r, 4 * c : 4 * c + 4], "w": grads["w"][r, :, 5 * c : 5 * c + 5]})
        for r in range(4)
        for c in range(2)
    ]
    np.testing.assert_allclose(jax.tree.leaves(run(("model", "data"))), np.mean(shards, axis=0), rtol=1e-6)


def test_wrong_arguments_of_the_average():
    for settings, error, message in (
        ({"every": 0}, ValueError, "every=0: expected 1 or more"),
        ({"every": 2.0}, TypeError, "every=2.0 .float.: expected an int"),
        ({"decay": 1.5}, ValueError, r"decay=1.5: expected a number in \[0, 1\]"),
        ({"decay": None}, TypeError, "decay=None"),
        ({"top_fraction": 2}, ValueError, "top_fraction=2"),
        ({"axis_name": 3}, ValueError, "axis_name=3"),
    ):
        with pytest.raises(error, match=message):
            track_importance(**settings)
    tx = track_importance()
    with pytest.raises(ValueError, match="but the state was made for"):
        tx.update({"a": jnp.ones(3)}, tx.init({"b": jnp.ones(3)}))
    assert isinstance(tx.init({}), ImportanceState)
    assert functools.reduce(lambda state, _: tx.update({}, state)[1], range(2), tx.init({})).count == 2
