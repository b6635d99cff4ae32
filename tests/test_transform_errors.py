"""What skipreduce says of wrong use, and how schedules are looked at."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from tests.helpers import (
    data_mesh,
    normal,
    powers_of_two,
    replicated_step,
    update,
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"skip_ratio": 1.0}, ValueError, r"skip_ratio=1.0: expected a number in \[0, 1\)"),
        ({"skip_ratio": -0.1}, ValueError, "skip_ratio=-0.1"),
        ({"skip_ratio": float("nan")}, ValueError, "skip_ratio=nan"),
        ({"skip_ratio": True}, TypeError, "skip_ratio=True"),
        ({"skip_ratio": "half"}, TypeError, "skip_ratio='half'"),
        ({"mode": "rand"}, ValueError, "mode='rand': expected 'random', 'static' or 'dropout'"),
        ({"normalize": None}, ValueError, "normalize=None: expected 'skip'"),
        ({"min_size": -1}, ValueError, "min_size=-1: expected 0 or more"),
        ({"min_size": 1.5}, TypeError, "min_size=1.5"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes=0: expected 1 or more"),
        ({"seed": None}, TypeError, "seed=None"),
        ({"seed": -1}, ValueError, "seed=-1: expected 0 or more"),
        ({"seed": 2**32}, ValueError, "seed=4294967296: expected 0 or more, up to 4294967295"),
        ({"skip_ratio": "0.5"}, TypeError, "skip_ratio='0.5'"),
        ({"skip_ratio": np.False_}, TypeError, "skip_ratio="),
        ({"axis_name": ()}, ValueError, r"axis_name=\(\)"),
    ],
)
def test_wrong_arguments_are_said_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        sr.skipreduce(**{"axis_name": "data", **arguments})


def test_a_schedule_out_of_range_is_said_when_the_step_is_traced():
    too_much = optax.linear_schedule(0.0, 1.0, 1000)
    with pytest.raises(ValueError, match=r"skip_ratio=1.0 at step 1000: expected a number in \[0, 1\)"):
        replicated_step(update(sr.skipreduce("data", too_much)), 8)({"w": normal((8, 4))})


def test_a_schedule_where_nothing_is_jitted():
    """Eager shard_map runs operations per device, and its values are traced although nothing is compiled."""
    tx = sr.skipreduce("data", optax.linear_schedule(0.0, 0.5, 2), min_size=0)
    grads = {"w": powers_of_two(8, 8)}
    for check_vma in (True, False):
        reduced = jax.shard_map(
            lambda g: tx.update({"w": g["w"][0]}, sr.SkipReduceState(jnp.int32(1)))[0],
            mesh=data_mesh(8),
            in_specs=P("data"),
            out_specs=P(),
            check_vma=check_vma,
        )(grads)
        assert {bin(int(value * 8)).count("1") for value in reduced["w"]} == {6}


def test_a_schedule_under_a_transfer_guard():
    tx = sr.skipreduce("data", optax.linear_schedule(0.0, 0.5, 2), min_size=0)
    run = replicated_step(lambda g, count: tx.update(g, sr.SkipReduceState(count))[0], 8)
    arguments = {"w": jax.device_put(normal((8, 8)), NamedSharding(data_mesh(8), P("data")))}, jnp.int32(1)
    with jax.transfer_guard_host_to_device("disallow"):
        run.lower(*arguments)


def test_a_schedule_that_leaves_the_range_between_the_steps_looked_at():
    method = sr.SkipReduce("data", lambda count: jnp.where(count == 7, -0.6, 0.5), min_size=0)
    tx = method.transform()
    run = replicated_step(lambda g, count: tx.update(g, sr.SkipReduceState(count))[0], 8)
    reduced = run({"w": powers_of_two(8, 8)}, jnp.int32(7))
    assert {bin(int(value * 8)).count("1") for value in reduced["w"]} == {8}
    with pytest.raises(ValueError, match=r"skip_ratio=-0.6.* at step 7"):
        method.describe({"w": jnp.zeros(8)}, 8, count=7)


@pytest.mark.promotes
def test_a_ratio_that_is_injected():
    inject = optax.inject_hyperparams(sr.skipreduce, static_args=("min_size", "bucket_bytes", "seed"))
    tx = inject("data", skip_ratio=0.5, min_size=0)
    grads = {"w": powers_of_two(8, 8)}
    run = replicated_step(lambda g, state: tx.update(g, state), 8)
    state = tx.init({"w": jnp.zeros(8)})
    reduced, state = run(grads, state)
    assert {bin(int(value * 8)).count("1") for value in reduced["w"]} == {4}
    state.hyperparams["skip_ratio"] = jnp.asarray(0.25)
    reduced, state = run(grads, state)
    assert {bin(int(value * 8)).count("1") for value in reduced["w"]} == {6}
    careless = optax.inject_hyperparams(sr.skipreduce)("data", skip_ratio=0.5)
    with pytest.raises(TypeError, match=r"seed is an array.*name it in static_args"):
        replicated_step(lambda g: careless.update(g, careless.init({"w": jnp.zeros(8)}))[0], 8)(grads)


def test_gradients_that_are_reduced_already():
    def step(params, batch):
        # Summed over the workers by shard_map.
        grads = jax.grad(lambda p, x: jnp.mean(x @ p["w"] + p["b"]))(params, batch)
        return sr.skipreduce("data").update(grads, sr.SkipReduceState(jnp.int32(0)))[0]

    run = jax.shard_map(step, mesh=data_mesh(8), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"the gradient 'b' is already the same on all workers of 'data'.*sr.local"):
        run({"w": jnp.ones((10, 3)), "b": jnp.ones(3)}, normal((64, 10)))
    with pytest.raises(ValueError, match=r"the gradient 'w' is already"):
        replicated_step(lambda g: update(sr.skipreduce("data"))({"w": lax.pmean(g, "data")}), 8)(normal((8, 4)))


def test_outside_of_shard_map():
    tx = sr.skipreduce("data")
    with pytest.raises(ValueError, match=r"no axis 'data' is bound here.*mesh="):
        tx.update({"w": jnp.ones(4)}, tx.init(None))


def test_a_counter_that_differs_between_workers():
    tx = sr.skipreduce("data", min_size=0)
    run = jax.shard_map(
        lambda g, count: tx.update(g, sr.SkipReduceState(count[0])),
        mesh=data_mesh(8),
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="the step counter of skipreduce varies over data"):
        run(normal((8, 4)), jnp.zeros(8, jnp.int32))


def test_dtype_that_cannot_be_reduced_names_the_leaf():
    with pytest.raises(TypeError, match="leaf 'a/b' has dtype float8_e5m2"):
        replicated_step(lambda g: update(sr.skipreduce("data"))({"a": {"b": g.astype("float8_e5m2")}}), 8)(
            normal((8, 4))
        )
