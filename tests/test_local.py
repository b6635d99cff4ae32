import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from tests.helpers import RUNNERS, data_mesh, each_worker, normal


def loss_fn(params, x):
    return jnp.sum(jnp.tanh(x @ params["w"]) ** 2) + params["unused"].sum() * 0.0


PARAMS = {"w": normal((5, 3), seed=9), "unused": jnp.ones(2)}


@pytest.mark.parametrize("runner", RUNNERS)
def test_gradients_are_those_of_the_local_batch(runner):
    x = normal((8, 4, 5))
    value, grads = each_worker(runner, lambda x, p: sr.local_value_and_grad(loss_fn, "data")(p, x), 8)(x, PARAMS)
    for rank in range(8):
        expected_value, expected = jax.value_and_grad(loss_fn)(PARAMS, x[rank])
        np.testing.assert_allclose(value[rank], expected_value, rtol=1e-5)
        np.testing.assert_allclose(grads["w"][rank], expected["w"], rtol=1e-5, atol=1e-6)


def test_every_gradient_is_typed_as_local_also_one_that_is_zero():
    def step(params, x):
        _, grads = sr.local_value_and_grad(lambda p, x: jnp.sum(x @ p["w"]), "data")(params, x[0])
        assert all(jax.typeof(g).mat.varying == {"data"} for g in jax.tree.leaves(grads))
        # Twice is fine, and so are parameters that are local already.
        again = sr.local_params(sr.local_params(params, "data"), "data")
        return sr.local_value_and_grad(loss_fn, "data")(again, x[0])[1]["w"][None]

    jax.jit(jax.shard_map(step, mesh=data_mesh(8), in_specs=(P(), P("data")), out_specs=P("data")))(
        PARAMS, normal((8, 4, 5))
    )


def test_has_aux_argnums_and_keywords():
    def loss(x, a, b, *, scale):
        return jnp.sum(x * a * b) * scale, {"max": x.max()}

    def step(x, a, b):
        run = sr.local_value_and_grad(loss, "data", argnums=(1, 2), has_aux=True)
        (value, aux), (grad_a, grad_b) = run(x, a, b, scale=2.0)
        return value, aux["max"], grad_a, grad_b

    x, a, b = normal((8, 3)), jnp.float32(2), jnp.float32(3)
    value, largest, grad_a, grad_b = each_worker("shard_map", step, 8)(x, a, b)
    np.testing.assert_allclose(value, 12 * x.sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(largest, x.max(1))
    np.testing.assert_allclose(grad_a, 6 * x.sum(1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(grad_b, 4 * x.sum(1), rtol=1e-5, atol=1e-5)


def test_local_over_several_axes():
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def step(params, x):
        grads = sr.local_value_and_grad(loss_fn, ("b", "a"))(params, x[0])[1]
        assert jax.typeof(grads["w"]).mat.varying == {"a", "b"}
        return grads["w"][None]

    x = normal((8, 4, 5))
    got = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(("a", "b"))), out_specs=P(("a", "b"))))(PARAMS, x)
    for rank in range(8):
        np.testing.assert_allclose(got[rank], jax.grad(loss_fn)(PARAMS, x[rank])["w"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduce", [lax.psum, lax.pmean])
def test_a_loss_that_is_reduced_already_is_noticed(reduce):
    with pytest.raises(ValueError, match=r"the loss is the same on all workers of 'data'.*take lax.pmean"):
        each_worker(
            "shard_map",
            lambda x, p: sr.local_value_and_grad(lambda p, x: reduce(loss_fn(p, x), "data"), "data")(p, x),
            8,
        )(normal((8, 4, 5)), PARAMS)


def test_an_axis_that_is_not_bound():
    with pytest.raises(ValueError, match="no axis 'data' is bound here"):
        sr.local_params(PARAMS, "data")
    with pytest.raises(ValueError, match="no axis 'data' is bound here"):
        sr.local_value_and_grad(loss_fn, "data")(PARAMS, normal((4, 5)))


def test_arguments_that_are_not_positional():
    run = sr.local_value_and_grad(loss_fn, "data")
    with pytest.raises(TypeError, match=r"argnums=0: called with 0 positional argument"):
        each_worker("vmap", lambda x: run(params=PARAMS, x=x), 8)(normal((8, 4, 5)))
    with_numpy = sr.local_value_and_grad(loss_fn, "data", argnums=np.int64(0))
    assert each_worker("vmap", lambda x: with_numpy(PARAMS, x)[1]["w"], 8)(normal((8, 4, 5))).shape == (8, 5, 3)


def on_one_worker(function, *args):
    return jax.shard_map(
        lambda x: jax.tree.map(lambda leaf: leaf[None], function(*args, x[0])),
        mesh=data_mesh(2),
        in_specs=P("data"),
        out_specs=P("data"),
    )(jnp.arange(2.0))


def test_leaves_that_are_no_arrays_pass():
    """As in an Equinox module: functions, names and flags are used, and have no gradient."""
    model = {"w": jnp.ones(3), "activation": jnp.tanh, "name": "mlp", "training": True, "none": None}

    def loss(model, x):
        assert model["training"] is True
        return model["activation"](model["w"] * x).sum() + len(model["name"])

    value, grads = on_one_worker(lambda model, x: sr.local_value_and_grad(loss, "data")(model, x), model)
    assert {key: grad is None for key, grad in grads.items()} == {key: key != "w" for key in model}
    np.testing.assert_allclose(grads["w"][1], 1 - np.tanh(1) ** 2 * np.ones(3), rtol=1e-6)
    assert value.shape == (2,)
    local = jax.vmap(lambda _: sr.local_params(model["w"], "data"), axis_name="data")(jnp.arange(2))
    assert local.shape == (2, 3)
    jax.vmap(lambda x: model.keys() == sr.local_params(model, "data").keys() and x, axis_name="data")(jnp.arange(2))


def test_integers_need_allow_int():
    params = {"w": jnp.ones(3), "table": jnp.arange(3)}

    def loss(params, x):
        return jnp.sum(params["w"][params["table"]] * x)

    with pytest.raises(TypeError, match=r"leaf 'table' has dtype int32, which has no gradient.*eqx\.partition"):
        on_one_worker(lambda p, x: sr.local_value_and_grad(loss, "data")(p, x)[1]["w"], params)

    def local(params, x):
        grads = sr.local_value_and_grad(loss, "data", allow_int=True)(params, x)[1]
        assert grads["table"].dtype == jax.dtypes.float0
        return grads["w"]

    np.testing.assert_array_equal(on_one_worker(local, params), [[0.0] * 3, [1.0] * 3])


def test_it_is_called_as_what_it_wraps():
    def loss_of_the_model(w, x):
        """Says what it is."""
        return jnp.sum(w * x)

    wrapped = sr.local_value_and_grad(loss_of_the_model, "data")
    assert (wrapped.__name__, wrapped.__doc__) == ("loss_of_the_model", "Says what it is.")
