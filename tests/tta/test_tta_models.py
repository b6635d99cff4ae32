"""The networks: their size, what is where in it, and that the language model does not look ahead."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_skipreduce as sr
from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce.programs.tta._lm import ByteLM, rotate
from jax_skipreduce.programs.tta._vgg import VGG

pytestmark = pytest.mark.promotes


def sizes(model, example):
    shapes = jax.eval_shape(model.init, jax.random.key(0), example)
    return dict(zip(leaf_paths(shapes), (leaf.size for leaf in jax.tree.leaves(shapes)), strict=True))


def test_the_gradient_of_vgg_is_large_and_dense():
    by_path = sizes(VGG(), jnp.zeros((1, 28, 28, 1)))
    total = sum(by_path.values())
    assert 8 * 2**20 <= 4 * total < 9 * 2**20
    is_conv = sr.by_path("conv")
    convolutions = sum(size for path, size in by_path.items() if is_conv(path, None))
    assert 0.02 < convolutions / total < 0.05
    assert sum(size for path, size in by_path.items() if "dense" in path) / total > 0.9


def test_the_gradient_of_lm():
    by_path = sizes(ByteLM(), jnp.zeros((1, 64), jnp.int32))
    assert 4 * 2**20 <= 4 * sum(by_path.values()) < 8 * 2**20
    named = [path for path in by_path if sr.by_path("embedding|norm|head")(path, None)]
    assert sorted(named) == [
        "params/embedding/embedding",
        "params/head/kernel",
        "params/layers/attention_norm/scale",
        "params/layers/mlp_norm/scale",
        "params/norm/scale",
    ]
    # Layers are stacked: one loop runs them.
    assert by_path["params/layers/attention_norm/scale"] == ByteLM.num_layers * ByteLM.size


@pytest.fixture(scope="module")
def lm():
    model = ByteLM(size=32, num_layers=2, num_heads=2, hidden_size=48)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 16)))
    return model, model.init(jax.random.key(0), tokens), tokens


@pytest.mark.parametrize("position", [1, 7, 15])
def test_a_later_byte_changes_no_earlier_logit(lm, position):
    model, params, tokens = lm
    before = model.apply(params, tokens)
    after = model.apply(params, tokens.at[0, position].add(1) % 256)
    assert before.shape == (2, 16, 256)
    np.testing.assert_array_equal(before[0, :position], after[0, :position])
    np.testing.assert_array_equal(before[1], after[1])
    assert (jnp.abs(before[0, position:] - after[0, position:]).max(-1) > 0).all()


def test_the_order_of_bytes_matters(lm):
    model, params, tokens = lm
    swapped = tokens.at[:, :2].set(tokens[:, 1::-1])
    assert not np.allclose(model.apply(params, tokens)[:, -1], model.apply(params, swapped)[:, -1], atol=1e-6)


def test_rotation_keeps_lengths_and_sees_distances_alone():
    rng = np.random.default_rng(0)
    query, key = (jnp.asarray(rng.normal(size=(1, 1, 1, 8)), jnp.float32) for _ in range(2))
    queries, keys = (rotate(jnp.repeat(x, 6, axis=1))[0, :, 0] for x in (query, key))
    np.testing.assert_allclose(jnp.linalg.norm(queries, axis=-1), jnp.linalg.norm(query), rtol=1e-5)
    products = queries @ keys.T
    np.testing.assert_allclose(products[1:, 1:], products[:-1, :-1], rtol=1e-4, atol=1e-5)
    assert not np.allclose(products[0, 0], products[0, 1], atol=1e-3)
    np.testing.assert_allclose(queries[0], query[0, 0, 0])
