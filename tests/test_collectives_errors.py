"""What the collectives say of wrong arguments."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jax_skipreduce as sr
from tests.helpers import (
    bits,
    normal,
    replicated_step,
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_skipped": 8}, ValueError, r"num_skipped=8: expected 0..7 for 8 workers"),
        ({"num_skipped": -1}, ValueError, r"num_skipped=-1"),
        ({"num_skipped": 0.5}, TypeError, r"num_skipped=0.5 \(float\): expected an integer"),
        ({"num_skipped": True}, TypeError, r"num_skipped=True"),
        ({"num_skipped": jnp.int32(9)}, ValueError, r"num_skipped=9"),
        ({"num_skipped": jnp.float32(1)}, TypeError, r"num_skipped"),
        ({"shift": 1.0}, TypeError, r"shift=1.0"),
        ({"num_gather_skipped": 8}, ValueError, r"num_gather_skipped=8"),
        ({"normalize": "mean"}, ValueError, r"normalize='mean'.*'skip'.*'drop'.*None"),
        ({"mode": "random"}, ValueError, r"mode='random': expected 'skip' or 'dropout'"),
        ({"mode": "dropout"}, TypeError, r"key=None: mode='dropout' needs"),
    ],
)
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        replicated_step(lambda x: sr.all_reduce(x, "data", **arguments), 8)(normal((8, 8)))


def test_a_k_that_differs_between_workers_would_hang():
    x = normal((8, 8))
    for name in ("num_skipped", "shift", "num_gather_skipped"):
        with pytest.raises(ValueError, match=rf"{name} varies over data: workers that disagree"):
            replicated_step(lambda x, name=name: sr.all_reduce(x, "data", **{name: lax.axis_index("data")}), 8)(x)
    with pytest.raises(TypeError, match=r"num_skipped has type ~?float32\[\]"):
        replicated_step(lambda x, k: sr.all_reduce(x, "data", num_skipped=k), 8)(x, 1.0)
    with pytest.raises(TypeError, match=r"shift has type int32\[2\]"):
        replicated_step(lambda x, c: sr.all_reduce(x, "data", shift=c), 8)(x, jnp.arange(2))


def test_a_traced_k_out_of_range_is_clamped():
    x = normal((8, 24))
    function = replicated_step(lambda x, k: sr.all_reduce(x, "data", num_skipped=k, normalize="drop"), 8)
    assert bits(function(x, 100)) == bits(function(x, 7))
    assert bits(function(x, -3)) == bits(function(x, 0))
    assert bits(function(x, jnp.uint32(2**32 - 1))) == bits(function(x, 7))


@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn", "int4"])
def test_dtypes_that_cannot_be_reduced(dtype):
    with pytest.raises(TypeError, match=rf"x has dtype {dtype}, which cannot be reduced. Cast it to one of float16"):
        replicated_step(lambda x: sr.all_reduce(x.astype(dtype), "data"), 8)(normal((8, 8)))
    with pytest.raises(TypeError, match="cannot be reduced"):
        jax.vmap(lambda x: sr.all_reduce(jax.random.key(0), "data"), axis_name="data")(normal((8, 8)))


def test_unknown_axes():
    x = normal((8, 8))
    for axis_name in ("model", ("data", "model")):
        with pytest.raises(ValueError, match=r"no axis 'model' is bound here.*jax.shard_map"):
            replicated_step(lambda x, a=axis_name: sr.all_reduce(x, a), 8)(x)
    with pytest.raises(ValueError, match="no axis 'data' is bound here"):
        sr.all_reduce(x, "data")
    for axis_name in ((), None, ("data", "data")):
        with pytest.raises(ValueError, match="axis_name="):
            replicated_step(lambda x, a=axis_name: sr.all_reduce(x, a), 8)(x)
    nested = jax.vmap(jax.vmap(lambda x: sr.all_reduce(x, ("a", "b")), axis_name="b"), axis_name="a")
    with pytest.raises(ValueError, match=r"under jax.vmap give one axis"):
        nested(normal((2, 4, 8)))


def test_all_gather_checks_the_shape():
    with pytest.raises(ValueError, match=r"shape=\(3, 3\): 9 elements over 8 workers make slices of 2 elements"):
        replicated_step(lambda x: sr.all_gather(x, "data", shape=(3, 3)), 8)(normal((8, 3)))
    whole = replicated_step(lambda x: sr.all_gather(x, "data", shift=-1), 8)(normal((8, 3)))
    assert bits(whole) == bits(normal((8, 3)))
