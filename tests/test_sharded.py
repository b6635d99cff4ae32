"""Parameters that are sharded over a model axis: ``skipreduce(mesh=..)`` and shard_map over the data axis alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from tests.helpers import bits, collectives, each_worker, expected_sum, normal, powers_of_two

SPECS = {"w1": P(None, "model"), "b1": P("model"), "w2": P("model", None), "scale": P()}


def params():
    return {
        "w1": normal((16, 64), seed=1) / 4,
        "b1": jnp.zeros(64),
        "w2": normal((64, 12), seed=2) / 8,
        "scale": jnp.ones(12),
    }


def loss_fn(params, x, out_sharding=None):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((jnp.matmul(hidden, params["w2"], out_sharding=out_sharding) * params["scale"] - 1.0) ** 2)


def make_mesh(axis_type):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def placed(mesh, tree, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), tree, specs)


def stacked_gradients(mesh, loss=loss_fn):
    if AxisType.Explicit in mesh.axis_types:
        loss = functools.partial(loss, out_sharding=P(None, None))
    return jax.vmap(jax.grad(loss), in_axes=(None, 0), spmd_axis_name="data")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("ratio", [0.0, 0.5])
def test_tensor_parallel_parameters_stay_sharded(axis_type, ratio):
    mesh = make_mesh(axis_type)
    tx = sr.skipreduce("data", ratio, mesh=mesh, param_specs=SPECS, min_size=16, mode="static")
    batch = normal((4, 8, 16), seed=3)
    with jax.set_mesh(mesh):

        @jax.jit
        def step(params, state, batch):
            return tx.update(stacked_gradients(mesh)(params, batch), state, params)

        arguments = placed(mesh, params(), SPECS), tx.init(None), placed(mesh, batch, P("data"))
        grads, state = step(*arguments)
        text = step.lower(*arguments).compile().as_text()
    assert int(state.num_reductions) == 1
    for name, spec in SPECS.items():
        assert grads[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), grads[name].ndim)

    # Each model shard is reduced by itself, as if it were the whole parameter.
    local = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params(), batch)
    alone = each_worker("vmap", lambda g: sr.all_reduce(g, "data", num_skipped=round(4 * ratio)), 4)
    for name, split in (("w1", 2), ("w2", 1)):
        halves = [alone(half)[0] for half in jnp.split(local[name], 2, axis=split)]
        np.testing.assert_allclose(grads[name], jnp.concatenate(halves, axis=split - 1), atol=1e-6)
    np.testing.assert_allclose(grads["scale"], local["scale"].mean(0), atol=1e-6)

    # The only gathers are those of the ring: rows of 4 slices. Nothing is gathered over the model axis.
    gathered = [shape for shape, operation in collectives(text) if operation == "all-gather"]
    assert gathered
    largest = (16 * 64) // 2
    for shape in gathered:
        assert shape.startswith("f32[4,")
        assert 4 * int(shape.split(",")[1].split("]")[0]) <= largest + (64 * 12) // 2 + 64
    assert not [operation for _, operation in collectives(text) if operation == "all-to-all"]


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_contributors(axis_type):
    mesh = make_mesh(axis_type)
    tx = sr.skipreduce("data", 0.5, mesh=mesh, mode="static", min_size=0, param_specs=P())
    grads = placed(mesh, {"w": powers_of_two(4, 8)}, {"w": P("data")})
    with jax.set_mesh(mesh):
        reduced, _ = jax.jit(tx.update)(grads, tx.init(None), {"w": jnp.ones(8)})
    np.testing.assert_array_equal(reduced["w"] * 4, expected_sum(4, 2, 0, 2))


def test_auto_axes_without_specs_are_warned_of():
    mesh = make_mesh(AxisType.Auto)
    tx = sr.skipreduce("data", 0.5, mesh=mesh, min_size=0)
    grads, params = {"w": jnp.ones((4, 8))}, {"w": jnp.ones(8)}
    with pytest.warns(UserWarning, match=r"the mesh has Auto axes \['model'\] .* Give param_specs"):
        jax.jit(tx.update)(grads, tx.init(None), params)
    # Nothing to gather: no other axis, or one whose sharding types tell.
    alone = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    sr.skipreduce("data", 0.5, mesh=alone).update({"w": jnp.ones((8, 8))}, tx.init(None), params)
    explicit = make_mesh(AxisType.Explicit)
    with jax.set_mesh(explicit):
        grads = placed(explicit, grads, {"w": P("data")})
        sr.skipreduce("data", 0.5, mesh=explicit).update(grads, tx.init(None), params)


def test_data_axes_in_any_order_and_a_mesh_that_is_not_set():
    mesh = jax.make_mesh((2, 2, 2), ("a", "model", "b"), axis_types=(AxisType.Auto,) * 3)
    for names in (("a", "b"), ("b", "a")):
        tx = sr.skipreduce(names, 0.5, mesh=mesh, mode="static", min_size=0, param_specs={"w": P("model")})
        reduced, _ = jax.jit(tx.update)({"w": powers_of_two(4, 16)}, tx.init(None), {"w": jnp.ones(16)})
        total = np.asarray(reduced["w"] * 4, np.int64).reshape(2, 4, 2)
        counts = [bin(value).count("1") for value in total.ravel()]
        assert set(counts) == {2}
        # Both model shards lose the same workers, and each worker is left out of two slices of four.
        np.testing.assert_array_equal(total[0], total[1])
        assert ((total[0, :, 0][:, None] >> np.arange(4)) & 1).sum(0).tolist() == [2] * 4


def test_the_same_numbers_as_inside_shard_map():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    grads = {"a": normal((8, 40, 30)), "b": normal((8, 30)), "n": None, "c": normal((8, 2000), jnp.bfloat16)}
    outside = sr.skipreduce("data", 0.5, mesh=mesh)
    inside = sr.skipreduce("data", 0.5)
    got, _ = jax.jit(outside.update)(grads, outside.init(None), jax.tree.map(lambda g: g[0], grads))
    expected = each_worker("shard_map", lambda g: inside.update(g, inside.init(None))[0], 8)(grads)
    assert [bits(x) for x in jax.tree.leaves(got)] == [bits(x[0]) for x in jax.tree.leaves(expected)]


@pytest.mark.promotes
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_training_compiles_once_and_learns(axis_type):
    mesh = make_mesh(axis_type)
    tx = optax.chain(
        sr.skipreduce("data", optax.linear_schedule(0.0, 0.5, 5), mesh=mesh, param_specs=SPECS), optax.adam(1e-2)
    )
    with jax.set_mesh(mesh):
        weights = placed(mesh, params(), SPECS)
        state = jax.jit(tx.init)(weights)
        batch = placed(mesh, normal((4, 8, 16), seed=3), P("data"))

        @jax.jit
        def step(params, state, batch):
            updates, state = tx.update(stacked_gradients(mesh)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        before = float(loss_fn(params(), batch.reshape(-1, 16) if axis_type is AxisType.Auto else np.asarray(batch)))
        weights, state = step(weights, state, batch)
        compiled = step._cache_size()
        for _ in range(30):
            weights, state = step(weights, state, batch)
    # The state of the first call lay where jit(init) put it, so one more program may be there, and no third.
    assert step._cache_size() <= compiled + 1
    assert int(state[0].num_reductions) == 31
    assert float(loss_fn(jax.device_get(weights), np.asarray(batch))) < 0.3 * before


def test_specs_are_taken_from_types_where_axes_are_explicit():
    mesh = make_mesh(AxisType.Explicit)
    tx = sr.skipreduce("data", 0.5, mesh=mesh, min_size=0)
    weights = {"w": jnp.ones((16, 8))}
    grads = placed(mesh, {"w": normal((4, 16, 8))}, {"w": P("data", None, "model")})
    with jax.set_mesh(mesh):
        reduced, _ = jax.jit(tx.update)(grads, tx.init(None), placed(mesh, weights, {"w": P(None, "model")}))
    assert reduced["w"].sharding.spec == P(None, "model")


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(("axis_type", "param_specs"), [(AxisType.Auto, SPECS), (AxisType.Explicit, None)])
def test_shard_map_over_the_data_axis_alone(axis_type, param_specs, check_vma):
    mesh = make_mesh(axis_type)
    settings = {"min_size": 16, "normalize": "drop"}
    tx = sr.skipreduce("data", 0.5, param_specs=param_specs, **settings)
    stacked = jax.tree.map(lambda x: jnp.stack([x * 2.0**rank for rank in range(4)]), params())
    grads = placed(mesh, stacked, {name: P("data", *spec) for name, spec in SPECS.items()})

    @jax.jit
    def run(grads):
        return jax.shard_map(
            lambda g: tx.update(jax.tree.map(lambda x: x[0], g), sr.SkipReduceState(jnp.int32(5)))[0],
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            axis_names={"data"},
            check_vma=check_vma,
        )(grads)

    with jax.set_mesh(mesh):
        reduced = run(grads)
        text = run.lower(grads).compile().as_text()
    for name, spec in SPECS.items():
        assert reduced[name].sharding.is_equivalent_to(NamedSharding(mesh, spec), reduced[name].ndim)
    # The same as for stacked gradients, which go through a shard_map over the whole mesh.
    whole = sr.skipreduce("data", 0.5, mesh=mesh, param_specs=SPECS, **settings)
    with jax.set_mesh(mesh):
        expected, _ = jax.jit(whole.update)(grads, sr.SkipReduceState(jnp.int32(5)), placed(mesh, params(), SPECS))
    for one, other in zip(jax.tree.leaves(reduced), jax.tree.leaves(expected), strict=True):
        assert bits(one) == bits(other)
    if axis_type is AxisType.Auto:  # entering with Explicit axes gathers by itself
        ring = [shape for shape, operation in collectives(text) if operation == "all-gather"]
        assert [shape.split("]")[0] for shape in ring] == [f"f32[4,{(16 * 32 + 32 + 32 * 12) // 4}"]


def test_gradients_of_integers_pass():
    """As `float0`, which holds nothing and cannot go through a shard_map."""
    mesh = make_mesh(AxisType.Auto)
    tx = sr.skipreduce("data", 0.5, mesh=mesh, min_size=0, param_specs=P())
    weights = {"w": jnp.ones((8,)), "n": jnp.zeros((3,), jnp.int32)}
    loss = jax.grad(lambda p, x: jnp.sum(p["w"] * x), allow_int=True)
    grads = jax.vmap(loss, in_axes=(None, 0))(weights, normal((4, 8)))
    reduced, _ = tx.update(grads, tx.init(None), weights)
    assert reduced["n"].dtype == jax.dtypes.float0
    assert reduced["n"].shape == (3,)
    assert reduced["w"].shape == (8,)


def test_param_specs_where_all_axes_are_manual():
    tx = sr.skipreduce("data", param_specs=P("model"))
    with pytest.raises(ValueError, match="there is no mesh axis here that is not manual, so gradients are shards"):
        jax.shard_map(
            lambda g: tx.update({"w": g[0]}, tx.init(None))[0],
            mesh=make_mesh(AxisType.Auto),
            in_specs=P("data"),
            out_specs=P(),
        )(jnp.ones((4, 8)))


@pytest.mark.parametrize(
    ("settings", "grads", "params", "message"),
    [
        ({}, (3, 8), (8,), r"gradient 'w' has shape \(3, 8\): with mesh=, expected \(4, 8\), one row per worker"),
        ({}, (), (), r"gradient 'w' has shape \(\)"),
        # A gradient that was not stacked, of a parameter whose first dimension happens to be 4.
        ({}, (4, 8), (4, 8), r"gradient 'w' has shape \(4, 8\)"),
        ({}, (4, 8), None, r"params=None: with mesh=, call update\(grads, state, params\)"),
        ({"param_specs": {"v": P()}}, (4, 8), (8,), "param_specs does not match the tree of parameters"),
        ({"param_specs": {"w": P("data")}}, (4, 8), (8,), r"can be sharded over \['model'\] here, not over data"),
        ({"param_specs": {"w": P("modle")}}, (4, 8), (8,), r"param_specs has .* for 'w'.* not over modle"),
        ({"param_specs": P(None, "model")}, (4, 8), (8,), r"for 'w': expected at most 1 entries"),
    ],
)
def test_wrong_gradients_and_specs(settings, grads, params, message):
    tx = sr.skipreduce("data", mesh=make_mesh(AxisType.Auto), **settings)
    weights = None if params is None else {"w": jnp.ones(params)}
    with pytest.raises(ValueError, match=message):
        jax.jit(tx.update)({"w": jnp.ones(grads)}, tx.init(None), weights)


def test_parameters_of_another_structure():
    tx = sr.skipreduce("data", mesh=make_mesh(AxisType.Auto))
    with pytest.raises(ValueError, match="params and gradients differ in structure"):
        tx.update({"w": jnp.ones((4, 8))}, tx.init(None), {"v": jnp.ones(8)})


def test_wrong_arguments():
    mesh = make_mesh(AxisType.Auto)
    with pytest.raises(ValueError, match=r"axis_name='batch': the mesh has no axis \['batch'\]"):
        sr.skipreduce("batch", mesh=mesh)
    tx = sr.skipreduce("data", mesh=mesh, param_specs={"w": "model"})
    with pytest.raises(TypeError, match="param_specs has model for 'w': expected a PartitionSpec"):
        tx.update({"w": jnp.ones((4, 8))}, tx.init(None), {"w": jnp.ones(8)})
    tx = sr.skipreduce("data", mesh=mesh)
    with pytest.raises(ValueError, match=r"mesh was given, but \['data'\] are manual axes here"):
        jax.shard_map(
            lambda g: tx.update({"w": g}, tx.init(None))[0],
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
            axis_names={"data"},
        )(jnp.ones((4, 8)))
