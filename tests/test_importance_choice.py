"""choose_protected() and its table."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jax_skipreduce as sr
from jax_skipreduce._importance.choice import choose_protected
from jax_skipreduce._importance.importance import importance
from tests.helpers import normal

# 10,000 floats: percentages are easy to see.
PARAMS = {
    "conv": {"kernel": jnp.zeros((10, 20)), "bias": jnp.zeros(20)},
    "dense": [jnp.zeros((90, 100)), jnp.zeros((30, 10), jnp.bfloat16)],
    "head": jnp.zeros(480),
    "steps": jnp.zeros(5000, jnp.int32),
    "nothing": None,
    "empty": jnp.zeros((0, 3)),
}


def shares(kernel, large, narrow, head, bias=0.9):
    return {
        "conv": {"kernel": kernel, "bias": bias},
        "dense": [large, jnp.float32(narrow)],
        "head": np.float32(head),
        "steps": 0.0,
        "nothing": None,
        "empty": 0.0,
    }


def choose(kernel, large, narrow, head, max_protected_ratio=0.05, **settings):
    return choose_protected(
        shares(kernel, large, narrow, head), PARAMS, max_protected_ratio, **{"min_size": 100, **settings}
    )


def treatments(chosen):
    return {leaf.path: leaf.treatment for leaf in chosen.leaves}


def test_takes_the_most_important_that_fit():
    # 200 + 300 elements are the whole budget of 500.
    assert choose(0.8, 0.2, 0.7, 0.5).paths == ("conv/kernel", "dense/1")
    # The first takes 480; of the rest nothing fits.
    assert choose(0.6, 0.2, 0.7, 0.8).paths == ("head",)
    # One that does not fit is passed over. One that would leave no room for what holds more is not taken.
    assert choose(0.52, 0.1, 0.1, 0.5).paths == ("head",)
    assert choose(0.6, 0.9, 0.3, 0.5).paths == ()
    assert choose(0.8, 0.1, 0.3, 0.5).paths == ("conv/kernel", "dense/1")
    assert choose(0.8, 0.1, 0.3, 0.5, max_protected_ratio=0.0499).paths == ("head",)
    assert choose(0.8, 0.1, 0.3, 0.5, max_protected_ratio=0).paths == ()
    chosen = choose(0.8, 0.1, 0.3, 0.5, max_protected_ratio=1)
    assert chosen.paths == ("conv/kernel", "dense/1", "head")
    assert chosen.protected_ratio == pytest.approx(0.098)
    whole = 200 * 0.8 + 300 * 0.3 + 480 * 0.5 + 9000 * 0.1 + 20 * 0.9
    assert chosen.important_ratio == pytest.approx((200 * 0.8 + 300 * 0.3 + 480 * 0.5) / whole)


def test_what_is_no_more_important_than_all_is_not_chosen():
    # Not even where there is room, and not by rounding.
    assert (
        choose_protected(
            {"a": jnp.float32(0.1), "b": jnp.float32(0.1)}, {"a": jnp.ones(7), "b": jnp.ones(93)}, 1, min_size=0
        ).paths
        == ()
    )
    assert choose(0.0, 0.0, 0.0, 0.0, max_protected_ratio=1).paths == ()


def test_ties_by_size_then_by_place():
    params = {"a": jnp.ones(60), "b": jnp.ones(20), "c": jnp.ones(20), "d": jnp.ones(900)}
    equal = {"a": 0.5, "b": 0.5, "c": 0.5, "d": 0.1}
    chosen = [choose_protected(equal, params, budget, min_size=0).paths for budget in (0.02, 0.04, 0.09, 0.1)]
    # Within 90 elements the larger one and one of the others hold more than both of the others.
    assert chosen == [("b",), ("b", "c"), ("a", "b"), ("a", "b", "c")]


def test_what_there_is_no_choice_about():
    chosen = choose(0.8, 0.2, 0.7, 0.5)
    assert treatments(chosen) == {
        "conv/bias": "small",
        "conv/kernel": "protected",
        "dense/0": "skipped",
        "dense/1": "protected",
        "empty": "empty",
        "head": "skipped",
        "steps": "integer",
    }
    # As in skipreduce, small leaves are reduced in full, and take nothing of the budget.
    assert treatments(choose(0.8, 0.2, 0.7, 0.5, min_size=21))["conv/bias"] == "small"
    everything = choose(0.8, 0.2, 0.7, 0.5, min_size=0, max_protected_ratio=0.022)
    assert everything.paths == ("conv/bias", "conv/kernel")
    assert choose_protected({}, {}).paths == ()
    assert choose_protected({"n": 0.0}, {"n": jnp.arange(3)}).protected_ratio == 0
    assert "total" in str(choose_protected({}, {}))


def test_protects():
    chosen = choose(0.8, 0.2, 0.7, 0.5)
    described = sr.describe(PARAMS, 8, skip_ratio=0.5, min_size=100, protect=chosen)
    assert {leaf.path: leaf.treatment for leaf in described.leaves} == treatments(chosen)
    with pytest.raises(ValueError, match=r"the gradient 'other' was not among the parameters that sr.choose_protected"):
        sr.describe({"other": jnp.zeros(5000)}, 8, protect=chosen)


def test_of_shapes_and_of_sr_importance():
    grads = {"a": 9 * normal((40,)), "b": normal((960,), seed=1)}
    chosen = choose_protected(importance(grads), jax.eval_shape(lambda: grads), min_size=0)
    assert chosen.paths == ("a",)
    assert choose_protected(jnp.float32(0.25), np.zeros(3000)).leaves[0].path == "(root)"
    # Paths of Flax NNX are those that optax sees.
    state = nnx.state(nnx.Linear(40, 30, rngs=nnx.Rngs(0)), nnx.Param)
    pure = nnx.to_pure_dict(state)
    of_state = choose_protected(jax.tree.map(lambda _: jnp.float32(0.1), state), state, 1, min_size=0)
    assert [leaf.path for leaf in of_state.leaves] == [leaf.path for leaf in sr.describe(pure, 8).leaves]


def test_table():
    lines = str(choose(0.8, 0.2, 0.7, 0.5)).splitlines()
    assert lines[0].split() == ["gradient", "shape", "treatment", "elements", "of", "all", "important"]
    assert lines[3].split() == ["conv/kernel", "(10,", "20)", "protected", "200", "2.0%", "80.0%"]
    assert next(line for line in lines if line.startswith("steps")).split() == ["steps", "(5000,)", "integer", "5,000"]
    assert lines[-2].split() == ["total", "10,000", "24.3%"]
    assert lines[-1] == (
        "Protected: 2 of 7 leaves, 5.0% of the parameters (at most 5.0%), 15.2% of the important elements."
    )


def test_choosing_again_costs_one_compilation():
    """And none if the choice is the same: equal choices are one static argument."""
    grads = jax.tree.map(lambda leaf: None if leaf.size == 0 else jnp.ones((2, *leaf.shape), leaf.dtype), PARAMS)
    params = jax.tree.map(lambda leaf: None if leaf.size == 0 else leaf, PARAMS)
    num_traces = 0

    def step(grads, state, protect):
        nonlocal num_traces
        num_traces += 1
        tx = sr.skipreduce("data", 0.5, protect=protect, min_size=100, mode="static")
        return jax.vmap(lambda g: tx.update(g, state)[0], axis_name="data")(grads), state

    run = jax.jit(step, static_argnums=2)

    def choice(kernel, head):
        return choose_protected({**shares(kernel, 0.2, 0.1, head), "empty": None}, params, min_size=100)

    state = sr.SkipReduceState(jnp.int32(0))
    first, again, other = choice(0.8, 0.1), choice(0.7, 0.15), choice(0.1, 0.8)
    assert first == again != other
    assert hash(first) == hash(again)
    assert first != "conv/kernel"
    assert first in {again}
    reduced = [run(grads, state, protect)[0] for protect in (first, again, other, first)]
    assert num_traces == 2
    # With half of two workers skipped, the mean of ones is a half. The counter is the same for both.
    assert [(float(r["conv"]["kernel"][0, 0, 0]), float(r["head"][0, 0])) for r in reduced] == [
        *((1, 0.5), (1, 0.5), (0.5, 1), (1, 0.5))
    ]


def test_wrong_importances():
    params = {"a": jnp.zeros(2000), "b": jnp.zeros(3)}
    for value, error, message in (
        ({"a": 0.5}, ValueError, "importance and params differ in structure"),
        ({"a": 0.5, "b": jnp.nan}, ValueError, "importance of 'b' is nan: .* where a gradient is NaN or infinite"),
        ({"a": 1.5, "b": 0.0}, ValueError, r"importance of 'a' is 1.5: expected a share in \[0, 1\]$"),
        ({"a": -0.5, "b": 0.0}, ValueError, "importance of 'a' is -0.5"),
        ({"a": jnp.zeros(2), "b": 0.0}, TypeError, r"importance of 'a' is Array\(.*: expected a scalar"),
    ):
        with pytest.raises(error, match=message):
            choose_protected(value, params)
    with pytest.raises(
        TypeError, match=r"importance of 'a' .* If it is traced, call sr.choose_protected outside of jax.jit"
    ):
        jax.jit(lambda share: choose_protected({"a": share, "b": share}, params))(jnp.float32(0.5))
    right = {"a": 0.5, "b": 0.5}
    for settings, error, message in (
        ({"max_protected_ratio": 5}, ValueError, r"max_protected_ratio=5: expected a number in \[0, 1\], such as 0.05"),
        ({"max_protected_ratio": np.nan}, ValueError, "max_protected_ratio=nan"),
        ({"max_protected_ratio": "5%"}, TypeError, "max_protected_ratio='5%'"),
        ({"min_size": -1}, ValueError, "min_size=-1"),
        ({"min_size": 0.5}, TypeError, "min_size=0.5"),
    ):
        with pytest.raises(error, match=message):
            choose_protected(right, params, **settings)
    with pytest.raises(TypeError, match="max_protected= is called max_protected_ratio= since version"):
        choose_protected(right, params, max_protected=0.05)


@pytest.mark.promotes
def test_the_table_in_the_docs_is_what_is_printed(capsys):
    text = (Path(__file__).parent.parent / "docs" / "importance.md").read_text()
    (block, *_) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(block, {})
    assert f"```text\n{capsys.readouterr().out}```" in text


@pytest.mark.parametrize(
    ("old", "way_out"), [("protected_fraction", "protected_ratio"), ("mask", "give the Protection itself as protect=")]
)
def test_old_attributes_say_what_to_take(old, way_out):
    chosen = sr.choose_protected({"a": 0.9, "b": 0.1}, {"a": jnp.zeros(10), "b": jnp.zeros(990)}, min_size=1)
    with pytest.raises(AttributeError, match=f"Protection.{old}: since version 0.2, {way_out}"):
        getattr(chosen, old)
    assert not hasattr(chosen, "nothing")
