"""importance() against NumPy."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_skipreduce._importance import importance as _importance
from jax_skipreduce._importance.importance import importance
from tests.helpers import RUNNERS, bits, collectives, count_collectives, each_worker, normal, replicated_step


def oracle(grads, top_ratio=0.25):
    """The definition, in NumPy: by the value at the border, ties sharing what is left, zeros never."""
    leaves = [np.abs(np.asarray(leaf).astype(np.complex128)).ravel() for leaf in jax.tree.leaves(grads)]
    whole = np.concatenate(leaves)
    wanted = max(1, round(top_ratio * whole.size))
    threshold = np.partition(whole, whole.size - wanted)[whole.size - wanted]
    larger, ties = np.sum(whole > threshold), np.sum(whole == threshold)
    credit = (wanted - larger) / ties if threshold > 0 else 0.0
    return [(np.sum(leaf > threshold) + credit * np.sum(leaf == threshold)) / leaf.size for leaf in leaves]


def check(shares, grads, top_ratio=0.25):
    assert jax.tree.structure(shares) == jax.tree.structure(grads)
    for share in jax.tree.leaves(shares):
        assert share.dtype == jnp.float32
        assert share.shape == ()
    np.testing.assert_allclose(jax.tree.leaves(shares), oracle(grads, top_ratio), rtol=1e-6)


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


@pytest.mark.parametrize("top_ratio", [1e-9, 0.01, 0.25, 0.5, 1.0, np.float32(0.25), 1])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_is_that_of_numpy(dtype, top_ratio):
    grads = make_grads(dtype)
    check(importance(grads, top_ratio), grads, top_ratio)


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
def test_any_values(values, cut, top_ratio, is_tiny):
    # Subnormal numbers, which XLA takes for zeros when it computes with them.
    scaled = np.asarray(values, np.float32) * np.float32(1e-42 if is_tiny else 0.75)
    grads = [scaled[:cut], scaled[cut:]]
    shares = importance(grads, top_ratio)
    np.testing.assert_allclose(shares, oracle(grads, top_ratio), rtol=1e-6)
    important = sum(float(share) * part.size for share, part in zip(shares, grads, strict=True))
    assert important <= max(1, round(top_ratio * len(values))) + 1e-4


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
    monkeypatch.setattr(_importance, "_LOW_BITS", 4)
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
        with pytest.raises(ValueError, match=rf"top_ratio={value}: expected a number in \(0, 1\]"):
            importance(grads, value)
    for value in ("0.25", True, None):
        with pytest.raises(TypeError, match=r"top_ratio=.*expected a number"):
            importance(grads, value)
    with pytest.raises(TypeError, match="top_ratio="):
        jax.jit(importance)(grads, 0.25)
    with pytest.raises(TypeError, match="top_fraction= is called top_ratio= since version"):
        importance(grads, top_fraction=0.25)
    with pytest.raises(ValueError, match="axis_name='data': no axis 'data' is bound here"):
        importance(grads, axis_name="data")
    with pytest.raises(TypeError, match=r"leaf 'w' is 1.0 \(float\): expected an array"):
        importance({"w": 1.0})
    with pytest.raises(TypeError, match="leaf 'w' has dtype float8_e4m3fn"):
        importance({"w": jnp.ones(4, jnp.float8_e4m3fn)})
