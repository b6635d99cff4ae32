"""Numbers for a logger."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jax_skipreduce as sr

PARAMS = {"kernel": jnp.zeros((64, 64)), "bias": jnp.zeros(64)}


def test_follow_the_schedule():
    reduction = sr.SkipReduce("data", lambda count: jnp.where(count < 10, 0.0, 0.75))
    tx = optax.chain(optax.clip(1.0), optax.chain(reduction.transform(), optax.adam(1e-3)))
    state = tx.init(PARAMS)
    early = sr.metrics(state, PARAMS, 8, reduction)
    state = jax.tree.map(
        lambda leaf: sr.SkipReduceState(jnp.int32(12)) if isinstance(leaf, sr.SkipReduceState) else leaf,
        state,
        is_leaf=lambda leaf: isinstance(leaf, sr.SkipReduceState),
    )
    late = sr.metrics(state, PARAMS, 8, reduction)
    full = 14 * (512 + 8) * 4
    assert early == {
        "skipreduce/step": 0,
        "skipreduce/skip_ratio": 0.0,
        "skipreduce/num_skipped": 0,
        "skipreduce/skipped_ratio": 0.0,
        "skipreduce/bytes_sent": full,
        "skipreduce/bytes_saved": 0,
        "skipreduce/theoretical_speedup": 1.0,
    }
    sent = 8 * 512 * 4 + 14 * 8 * 4
    assert late == {
        "skipreduce/step": 12,
        "skipreduce/skip_ratio": 0.75,
        "skipreduce/num_skipped": 6,
        "skipreduce/skipped_ratio": 0.75 * 4096 / 4160,
        "skipreduce/bytes_sent": sent,
        "skipreduce/bytes_saved": full - sent,
        "skipreduce/theoretical_speedup": full / sent,
    }
    assert {type(value) for value in late.values()} == {int, float}


def test_of_a_state_that_is_stacked_by_pmap_or_alone():
    reduction = sr.SkipReduce("data", 0.5)
    assert sr.metrics(sr.SkipReduceState(jnp.full(8, 3, jnp.int32)), PARAMS, 8, reduction)["skipreduce/step"] == 3


def test_mistakes():
    reduction = sr.SkipReduce("data", 0.5)
    with pytest.raises(ValueError, match="opt_state holds 0 states of skipreduce"):
        sr.metrics(optax.adam(1.0).init(PARAMS), PARAMS, 8, reduction)
    with pytest.raises(ValueError, match="opt_state holds 2 states of skipreduce"):
        sr.metrics((reduction.transform().init(PARAMS), reduction.transform().init(PARAMS)), PARAMS, 8, reduction)
    with pytest.raises(TypeError, match=r"call sr\.metrics outside of jax\.jit"):
        jax.jit(lambda state: sr.metrics(state, PARAMS, 8, reduction))(reduction.transform().init(PARAMS))
    with pytest.raises(TypeError, match="method is a GradientTransformation"):
        sr.metrics(reduction.transform().init(PARAMS), PARAMS, 8, optax.adam(1.0))


def test_where_nothing_is_skipped():
    for settings in ({"protect": True}, {"mode": "dropout"}):
        reduction = sr.SkipReduce("data", 0.5, **settings)
        found = sr.metrics(reduction.transform().init(PARAMS), PARAMS, 8, reduction)
        assert (found["skipreduce/num_skipped"], found["skipreduce/skip_ratio"]) == (0, 0.0)
        assert found["skipreduce/bytes_saved"] == 0


def test_one_counter_is_found_beside_adams():
    tx = optax.chain(sr.skipreduce("data"), optax.adam(1e-3))
    state = tx.init(PARAMS)
    assert int(optax.tree.get(state, "count")) == 0
    assert int(optax.tree.get(state, "num_reductions")) == 0
    with pytest.raises(AttributeError, match="called num_reductions since version"):
        _ = state[0].count
