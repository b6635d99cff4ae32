import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_skipreduce as sr
from jax_skipreduce._gradients import selection as _selection
from jax_skipreduce._gradients.selection import protected_leaves
from tests.helpers import normal


def treatments(tree, protect, min_size):
    return _selection.treatments(tree, protected_leaves(tree, protect), min_size)


TREE = {
    "conv": {"kernel": jnp.zeros((3, 3, 8, 16)), "bias": jnp.zeros(16)},
    "dense": [jnp.zeros((100, 20)), jnp.zeros((20, 5), jnp.bfloat16)],
    "steps": jnp.zeros((2000,), jnp.int32),
    "flags": jnp.zeros((3,), bool),
    "nothing": None,
    "more": {},
    "empty": jnp.zeros((0, 7)),
}
PATHS = ["conv/bias", "conv/kernel", "dense/0", "dense/1", "empty", "flags", "steps"]


def named(answers):
    return dict(zip(PATHS, answers, strict=True))


def test_treatments():
    expected = ["small", "compressed", "compressed", "small", "empty", "integer", "integer"]
    assert named(treatments(TREE, None, 1024)) == named(expected)
    assert treatments({}, None, 1024) == []
    # min_size is the smallest size that is skipped.
    assert named(treatments(TREE, None, 100))["dense/1"] == "compressed"
    assert named(treatments(TREE, None, 101))["dense/1"] == "small"
    # What is small does not become large by being protected.
    assert set(treatments(TREE, lambda path, leaf: True, 0)) == {"protected", "empty", "integer"}


def test_gradients_of_integers_are_left_alone():
    grads = jax.grad(lambda p: p["w"] * 2.0, allow_int=True)({"w": 1.0, "n": 3})
    assert grads["n"].dtype == jax.dtypes.float0
    assert treatments(grads, None, 0) == ["empty", "compressed"]


def test_by_path():
    marks = protected_leaves(TREE, sr.by_path(r"^conv/|dense/1$"))
    assert [path for path, mark in named(marks).items() if mark] == ["conv/bias", "conv/kernel", "dense/1"]
    with pytest.raises(ValueError, match=r"pattern='\(' is not a regular expression"):
        sr.by_path("(")


def test_an_attribute_called_value_is_part_of_the_path():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Attention:
        query: jax.Array
        value: jax.Array

    tree = {"attn": Attention(jnp.zeros(2), jnp.zeros(2))}
    assert _selection.leaf_paths(tree) == ["attn/query", "attn/value"]
    assert protected_leaves(tree, sr.by_path("attn/value$")) == [False, True]


def test_a_function_of_something_else():
    with pytest.raises(TypeError, match=r"expected a function of \(path, leaf\)"):
        protected_leaves(TREE, lambda params: params)


def test_a_function_sees_path_and_leaf():
    marks = protected_leaves(TREE, lambda path, leaf: leaf.ndim == 4 or path.endswith("1"))
    assert [path for path, mark in named(marks).items() if mark] == ["conv/kernel", "dense/1"]


def test_a_mask():
    mask = jax.tree.map(lambda leaf: leaf.ndim == 1, TREE)
    assert named(protected_leaves(TREE, mask)) == {
        **dict.fromkeys(PATHS, False),
        **dict.fromkeys(["conv/bias", "flags", "steps"], True),
    }
    prefix = {**dict.fromkeys(TREE, False), "conv": np.bool_(True), "dense": [False, True]}
    assert [path for path, mark in named(protected_leaves(TREE, prefix)).items() if mark] == [*PATHS[:2], "dense/1"]
    assert all(protected_leaves(TREE, True))


def test_a_mask_that_does_not_match():
    with pytest.raises(ValueError, match="protect: the mask does not match the tree of gradients"):
        protected_leaves(TREE, {"conv": True})
    with pytest.raises(ValueError, match="protect: the mask does not match"):
        protected_leaves(TREE, {**dict.fromkeys(TREE, False), "dense": [True]})


def test_marks_are_bools():
    with pytest.raises(TypeError, match=r"returned 1.0 for the leaf 'conv/bias': expected True or False"):
        protected_leaves(TREE, lambda path, leaf: 1.0)
    with pytest.raises(TypeError, match=r"the mask protect has 'yes' for the leaf"):
        protected_leaves({"a": jnp.zeros(2)}, {"a": "yes"})
    with pytest.raises(TypeError, match=r"a string is no mask.*sr.by_path\('head'\)"):
        protected_leaves({"a": jnp.zeros(2)}, "head")
    with pytest.raises(TypeError, match=r"pattern=\['head'\] \(list\)"):
        sr.by_path(["head"])
    with pytest.raises(TypeError, match="not on values"):
        jax.jit(lambda x: protected_leaves({"a": x}, lambda path, leaf: leaf.sum() > 0))(jnp.zeros(2))


def test_leaves_that_cannot_be_reduced():
    with pytest.raises(TypeError, match="leaf 'a/0' has dtype float8_e4m3fn, which cannot be reduced"):
        treatments({"a": [jnp.zeros(4, jnp.float8_e4m3fn)]}, None, 0)
    with pytest.raises(TypeError, match="leaf 'key' has dtype key<fry>"):
        treatments({"key": jax.random.key(0)}, None, 0)
    with pytest.raises(TypeError, match=r"leaf 'a' is 1.0 \(float\): expected an array"):
        treatments({"a": 1.0}, None, 0)


def test_a_pattern_that_matches_no_leaf_is_warned_of():
    grads = {"dense": normal((8, 2000))}

    def run(protect):
        tx = sr.skipreduce("data", 0.5, protect=protect)
        return jax.vmap(lambda g: tx.update(g, tx.init(None))[0], axis_name="data")(grads)

    with pytest.warns(UserWarning, match=r"protect=by_path\('\^conv'\) matches no leaf.*sr\.describe shows the paths"):
        run(sr.by_path("^conv"))
    # Whoever gives a mask or a function of their own may mean it.
    run({"dense": False})
    run(lambda path, leaf: False)
    run(sr.by_path("dense"))
