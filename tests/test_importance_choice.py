"""choose_protected(), its table and picture; the tracker of choices."""

import importlib
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jax_skipreduce as sr
from jax_skipreduce._importance.average import track_importance
from jax_skipreduce._importance.choice import Protection, choose_protected
from jax_skipreduce._importance.importance import importance
from jax_skipreduce._importance.tracker import ImportanceTracker, spearman
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


def choose(kernel, large, narrow, head, max_protected=0.05, **settings):
    return choose_protected(shares(kernel, large, narrow, head), PARAMS, max_protected, **{"min_size": 100, **settings})


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
    assert choose(0.8, 0.1, 0.3, 0.5, max_protected=0.0499).paths == ("head",)
    assert choose(0.8, 0.1, 0.3, 0.5, max_protected=0).paths == ()
    chosen = choose(0.8, 0.1, 0.3, 0.5, max_protected=1)
    assert chosen.paths == ("conv/kernel", "dense/1", "head")
    assert chosen.protected_fraction == pytest.approx(0.098)
    whole = 200 * 0.8 + 300 * 0.3 + 480 * 0.5 + 9000 * 0.1 + 20 * 0.9
    assert chosen.important_fraction == pytest.approx((200 * 0.8 + 300 * 0.3 + 480 * 0.5) / whole)


def test_what_is_no_more_important_than_all_is_not_chosen():
    # Not even where there is room, and not by rounding.
    assert (
        choose_protected(
            {"a": jnp.float32(0.1), "b": jnp.float32(0.1)}, {"a": jnp.ones(7), "b": jnp.ones(93)}, 1, min_size=0
        ).paths
        == ()
    )
    assert choose(0.0, 0.0, 0.0, 0.0, max_protected=1).paths == ()


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
    everything = choose(0.8, 0.2, 0.7, 0.5, min_size=0, max_protected=0.022)
    assert everything.paths == ("conv/bias", "conv/kernel")
    assert choose_protected({}, {}).paths == ()
    assert choose_protected({"n": 0.0}, {"n": jnp.arange(3)}).protected_fraction == 0
    assert "total" in str(choose_protected({}, {}))


def test_protects():
    chosen = choose(0.8, 0.2, 0.7, 0.5)
    assert jax.tree.structure(chosen.mask) == jax.tree.structure(PARAMS)
    assert [path for path, mark in zip(treatments(chosen), jax.tree.leaves(chosen.mask), strict=True) if mark] == [
        "conv/kernel",
        "dense/1",
    ]
    for protect in (chosen, chosen.mask):
        described = sr.describe(PARAMS, 8, skip_ratio=0.5, min_size=100, protect=protect)
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


def test_picture(tmp_path):
    path = tmp_path / "importance.png"
    choose(0.8, 0.2, 0.7, 0.5).save_figure(path)
    assert path.read_bytes().startswith(b"\x89PNG")
    (text := tmp_path / "importance.svg").write_text("")
    choose(0.0, 0.0, 0.0, 0.0).save_figure(str(text))
    # Text is drawn as paths, with the text itself in comments.
    assert "<!-- dense/1 -->" in text.read_text()
    odd = choose_protected({"$a_b$": 0.9, "": 0.1}, {"$a_b$": jnp.zeros(2), "": jnp.zeros(3)}, 1, min_size=0)
    odd.save_figure(path)
    choose_protected({}, {}).save_figure(path)
    with pytest.raises(ValueError, match="xyz"):
        odd.save_figure(tmp_path / "a.xyz")


def test_picture_without_matplotlib(monkeypatch, tmp_path):
    monkeypatch.delitem(sys.modules, "jax_skipreduce._importance.figure", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="the picture needs matplotlib, pip install matplotlib"):
        choose(0.8, 0.2, 0.7, 0.5).save_figure(tmp_path / "a.png")
    monkeypatch.undo()
    importlib.import_module("jax_skipreduce._importance.figure")


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
        ({"a": jnp.zeros(2), "b": 0.0}, TypeError, r"importance of 'a' has shape \(2,\): expected a scalar"),
    ):
        with pytest.raises(error, match=message):
            choose_protected(value, params)
    with pytest.raises(TypeError, match=r"importance of 'a' is traced: call sr.choose_protected outside of jax.jit"):
        jax.jit(lambda share: choose_protected({"a": share, "b": share}, params))(jnp.float32(0.5))
    right = {"a": 0.5, "b": 0.5}
    for settings, error, message in (
        ({"max_protected": 5}, ValueError, r"max_protected=5: expected a number in \[0, 1\], such as 0.05 for 5 %"),
        ({"max_protected": np.nan}, ValueError, "max_protected=nan"),
        ({"max_protected": "5%"}, TypeError, "max_protected='5%'"),
        ({"min_size": -1}, ValueError, "min_size=-1"),
        ({"min_size": 0.5}, TypeError, "min_size=0.5"),
    ):
        with pytest.raises(error, match=message):
            choose_protected(right, params, **settings)
        with pytest.raises(error, match=message):
            ImportanceTracker(params, **settings)


# The tracker.


def make_tracker(*rows, max_protected=0.05):
    tracker = ImportanceTracker(PARAMS, max_protected, min_size=100)
    for row in rows:
        tracker.record(shares(*row))
    return tracker


def test_rank_correlation():
    tracker = make_tracker((0.8, 0.1, 0.3, 0.5), (0.7, 0.2, 0.4, 0.6), (0.1, 0.8, 0.5, 0.3), (0.5, 0.2, 0.4, 0.6))
    assert tracker.rank_correlation(0, 1) == pytest.approx(1)
    assert tracker.rank_correlation(0, 2) == pytest.approx(-1)
    assert tracker.rank_correlation(0, 3) == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert tracker.rank_correlation() == tracker.rank_correlation(2, 3)
    # The bias is small, so there is no choice about it.
    assert list(tracker.snapshots[0].importances()) == ["conv/kernel", "dense/0", "dense/1", "head"]


def test_spearman():
    # With ties as scipy.stats.spearmanr has it.
    assert spearman([1, 2, 2, 4, 5], [2, 1, 3, 3, 9]) == pytest.approx(0.763157894736842)
    assert spearman([3, 1], [1, 3]) == pytest.approx(-1)
    for first, second in (([], []), ([1], [2]), ([1, 1], [1, 2]), ([1, 2], [0, 0])):
        assert math.isnan(spearman(first, second))


def test_how_long_a_choice_holds():
    tracker = make_tracker((0.8, 0.1, 0.3, 0.5), (0.8, 0.1, 0.3, 0.4), (0.1, 0.1, 0.2, 0.9), (0.25, 0.25, 0.25, 0.25))
    assert [snapshot.chosen.paths for snapshot in tracker.snapshots] == [
        *(("conv/kernel", "dense/1"), ("conv/kernel", "dense/1"), ("head",), ())
    ]
    assert (tracker.overlap(0, 1), tracker.overlap(0, 2), tracker.overlap(0, 3), tracker.overlap(3, 3)) == (1, 0, 0, 1)
    # At the end only the bias is more important than all, and it is small.
    whole = 200 * 0.1 + 9000 * 0.1 + 300 * 0.2 + 480 * 0.9 + 20 * 0.9
    assert tracker.held(2, 2) == pytest.approx(480 * 0.9 / whole)
    assert tracker.held(0, 2) == pytest.approx((200 * 0.1 + 300 * 0.2) / whole)
    assert tracker.chosen.paths == ()
    lines = str(tracker).splitlines()
    assert lines[2].split()[:5] == ["1", "-", "-", "5.0%", "-"]
    assert lines[3].split()[:5] == ["2", "1.00", "1.00", "5.0%", "100%"]
    # All leaves alike: there is no order.
    assert lines[5].split()[:4] == ["4", "-", "-", "0.0%"]
    assert "of 4 leaves" in str(tracker)


def test_takes_states():
    grads = {"a": 9 * normal((40,)), "b": normal((960,), seed=1)}
    tx = optax.chain(track_importance(), optax.scale(1.0))
    empty = tx.init(grads)
    _, state = tx.update(grads, empty)
    tracker = ImportanceTracker(grads, min_size=0)
    expected = choose_protected(importance(grads), grads, min_size=0)
    for number, value in enumerate((importance(grads), state[0], state, ("more", {"opt": state}))):
        chosen = tracker.record(value, label=f"epoch {number}")
        assert isinstance(chosen, Protection)
        assert chosen.leaves == expected.leaves
    assert tracker.snapshots[-1].label == "epoch 3"
    with pytest.raises(ValueError, match="nothing to record: after 0 steps"):
        tracker.record(empty)
    with pytest.raises(ValueError, match=r"2 of sr.track_importance"):
        tracker.record((state, state))
    with pytest.raises(TypeError, match="the state is traced"):
        jax.jit(tracker.record)(state)
    with pytest.raises(ValueError, match="differ in structure"):
        tracker.record(optax.adam(1.0).init(grads))
    assert len(tracker.snapshots) == 4


def test_without_snapshots():
    tracker = make_tracker()
    assert str(tracker) == "no snapshots: tracker.record(..) adds one"
    for call in (lambda: tracker.chosen, tracker.rank_correlation, tracker.overlap, tracker.held):
        with pytest.raises(IndexError, match=r"0 recorded. tracker.record"):
            call()
    one = make_tracker((0.8, 0.1, 0.3, 0.5))
    assert "mean" in str(one)
    with pytest.raises(IndexError, match="there is no snapshot -2: 1 recorded"):
        one.rank_correlation()


@pytest.mark.promotes
def test_the_table_in_the_docs_is_what_is_printed(capsys, tmp_path, monkeypatch):
    text = (Path(__file__).parent.parent / "docs" / "importance.md").read_text()
    (block, *_) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    assert f"```text\n{capsys.readouterr().out}```" in text
    assert (tmp_path / "importance.png").exists()
