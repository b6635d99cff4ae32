"""The registry, and what each method does with gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce.programs.tta import _methods

pytestmark = pytest.mark.promotes

N, STEPS = 4, 50
CONTEXT = _methods.Context("data", N, STEPS, protect="conv")
# Worker r contributes 2**r.
GRADS = {
    name: jnp.broadcast_to(2.0 ** jnp.arange(N)[:, None], (N, 4096))
    for name in ("params/conv1_1/kernel", "params/dense1/kernel")
}


def reduced(name, seed=0, num_steps=0):
    tx = _methods.find(name).make(CONTEXT)
    state = _methods.start_count(tx.init(GRADS), seed)
    state = jax.tree.map(lambda count: count + num_steps, state)
    mesh = jax.make_mesh((N,), ("data",), devices=jax.devices()[:N], axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P()), out_specs=P())
    def step(grads, state):
        return tx.update(jax.tree.map(lambda row: row[0], grads), state)[0]

    return jax.tree.map(np.asarray, step(GRADS, state))


def contributors(means):
    """Of each element: how many workers are in its mean, by the bits of the sum."""
    return np.bitwise_count(np.round(means * N).astype(np.uint32))


def test_defaults_are_registered():
    assert set(_methods.DEFAULT_METHODS) | set(_methods.QUICK_METHODS) <= set(_methods.METHODS)
    assert _methods.BASELINE in _methods.DEFAULT_METHODS
    assert {"skip-0", "skip-0-bf16", "skip-25"} == set(_methods.METHODS) - set(_methods.DEFAULT_METHODS)
    assert all(method.description for method in _methods.METHODS.values())


def test_a_method_is_added_by_name(monkeypatch):
    monkeypatch.setattr(_methods, "METHODS", dict(_methods.METHODS))

    @_methods.method("mine", "nothing")
    def mine(context):
        return optax.identity()

    assert _methods.find("mine").make is mine
    with pytest.raises(ValueError, match="name='mine': there is a method of this name"):
        _methods.method("mine", "again")(mine)
    with pytest.raises(ValueError, match=r"there is no method 'yours'; there are psum, .*mine"):
        _methods.find("yours")


@pytest.mark.parametrize(
    ("name", "conv", "dense"),
    [
        ("psum", N, N),
        ("psum-flat", N, N),
        ("psum-bf16", N, N),
        ("skip-0", N, N),
        ("skip-0-bf16", N, N),
        ("skip-25", 3, 3),
        ("skip-50", 2, 2),
        ("skip-75", 1, 1),
        ("skip-50-bf16", 2, 2),
        ("selective-50", N, 2),
        ("warmup-50", N, N),
    ],
)
def test_workers_in_the_mean(name, conv, dense):
    means = reduced(name)
    assert (contributors(means["params/conv1_1/kernel"]) == conv).all()
    assert (contributors(means["params/dense1/kernel"]) == dense).all()


@pytest.mark.parametrize("seed", [0, 1, 1000])
def test_warm_up_ends_after_a_tenth(seed):
    for num_steps, expected in ((STEPS // 10 - 1, N), (STEPS // 10, 2), (STEPS - 1, 2)):
        means = reduced("warmup-50", seed, num_steps)
        assert (contributors(means["params/dense1/kernel"]) == expected).all(), num_steps


def test_seeds_skip_differently():
    shifts = {tuple(reduced("skip-25", seed)["params/dense1/kernel"][::1024].tolist()) for seed in range(8)}
    assert len(shifts) > 1


def test_the_start_of_a_seed_moves_our_counter_alone():
    tx = optax.chain(sr.skipreduce("data", 0.5), optax.adam(1e-3))
    state = _methods.start_count(tx.init(jnp.zeros(3)), seed=7)
    assert (state[0].num_reductions, state[0].num_reductions.dtype) == (7 * 2**20, jnp.int32)
    assert state[1][0].count == 0
    # An int32 has to do for every seed.
    assert 0 <= _methods.start_count(tx.init(jnp.zeros(3)), seed=10**6 + 1)[0].num_reductions < 2**31 - 2**20 + 1
