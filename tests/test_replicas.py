"""Workers that drift apart are noticed, and named."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._checks.replicas import _difference, fingerprint
from tests.helpers import RUNNERS, data_mesh, each_worker, normal


def check(tree):
    sr.check_replicas(tree, "data")
    return jnp.int32(0)


def equal_rows(tree, num_workers=4):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * num_workers), tree)


TREE = {
    "dense": {"kernel": normal((3, 5)), "bias": jnp.zeros(7, jnp.bfloat16)},
    "half": jnp.ones((2, 3), jnp.float16),
    "count": jnp.int32(7),
    "mask": jnp.array([True, False, True]),
    "bytes": jnp.arange(5, dtype=jnp.uint8),
    "complex": jnp.ones(3, jnp.complex64),
    "nothing": jnp.zeros(0),
    "nibbles": jnp.arange(-3, 4, dtype=jnp.int4),
}


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_same_on_all_is_fine(runner):
    jax.block_until_ready(each_worker(runner, check, 4)(equal_rows(TREE)))


@pytest.mark.parametrize("runner", RUNNERS)
def test_names_worker_and_leaf(runner):
    rows = equal_rows(TREE)
    kernel = rows["dense"]["kernel"]
    rows["dense"]["kernel"] = kernel.at[2, 1, 3].set(np.nextafter(kernel[2, 1, 3], np.float32(9)))
    with pytest.raises(Exception, match=r"replicas differ: 'dense/kernel' on worker 2\. All workers have to"):
        jax.block_until_ready(each_worker(runner, check, 4)(rows))
    # And the next call is as if nothing had been.
    jax.block_until_ready(each_worker(runner, check, 4)(equal_rows(TREE)))


@pytest.mark.parametrize("name", ["half", "count", "mask", "bytes", "complex", "nibbles"])
def test_every_dtype(name):
    rows = equal_rows(TREE)
    row = np.array(rows[name][3])
    row.reshape(-1)[-1] = not row.reshape(-1)[-1] if row.dtype == bool else row.reshape(-1)[-1] + 1
    rows[name] = rows[name].at[3].set(row)
    with pytest.raises(Exception, match=f"replicas differ: '{name}' on worker 3"):
        jax.block_until_ready(each_worker("shard_map", check, 4)(rows))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12), st.integers(0, 11), st.integers(0, 31), st.data())
def test_one_bit_or_two_words_in_other_places_change_thefingerprint(words, place, bit, data):
    values = np.array(words, np.uint32)
    before = int(fingerprint(jnp.asarray(values)))
    flipped = values.copy()
    flipped[place % len(words)] ^= np.uint32(1 << bit)
    assert int(fingerprint(jnp.asarray(flipped))) != before
    i, j = (data.draw(st.integers(0, len(words) - 1)) for _ in range(2))
    swapped = values.copy()
    swapped[[i, j]] = swapped[[j, i]]
    assert (int(fingerprint(jnp.asarray(swapped))) != before) == (values[i] != values[j])


def test_zeros_of_either_sign_and_nan_count_by_their_bits():
    zero, minus = fingerprint(jnp.zeros(1)), fingerprint(-jnp.zeros(1))
    assert int(zero) != int(minus)
    nan = jnp.full(3, jnp.nan)
    assert int(fingerprint(nan)) == int(fingerprint(nan))


def test_without_a_majority_all_are_named():
    table = np.array([[1, 5], [1, 5], [2, 5], [2, 6]])
    text = _difference(table, ["a", "b"], "parameters")
    assert text.startswith("parameters differ: 'a' on all of 4 workers, of which no majority agrees; 'b' on worker 3. ")
    many = _difference(np.array([[1] * 7, [1] * 7, [2] * 7]), list("abcdefg"), "parameters")
    assert "'a', 'b', 'c', 'd', 'e' and 2 more on worker 2" in many


def test_one_worker_has_nobody_to_differ_from():
    text = each_worker("shard_map", check, 1).lower(equal_rows(TREE, 1)).as_text()
    assert "callback" not in text


def drifting(mesh, value):
    """A parameter that is typed as the same on all, and is not."""
    sharding = NamedSharding(mesh, P())
    shards = [jax.device_put(value + (i == 5), device) for i, device in enumerate(mesh.devices.flat)]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, shards)


def train_step(mesh, tx):
    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=(P(), P()))
    def step(params, state, batch):
        grads = jax.tree.map(lambda p: p * 0 + batch[0], sr.local_params(params, "data"))
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


@pytest.mark.promotes
def test_check_every_so_many_steps():
    mesh = data_mesh(8)
    tx = optax.chain(sr.skipreduce("data", 0.5, min_size=1), optax.sgd(0.1), sr.check_every(3, "data"))
    good, bad = {"w": jnp.ones(16)}, {"w": drifting(mesh, np.ones(16, np.float32))}
    step = train_step(mesh, tx)
    batch = jnp.arange(8.0)
    state = tx.init(good)
    for _ in range(4):
        good, state = step(good, state, batch)
    # Steps 4 and 5 do not look, step 6 does.
    for _ in range(2):
        _, state = jax.block_until_ready(step(bad, state, batch))
    with pytest.raises(Exception, match="parameters differ: 'w' on worker 5"):
        jax.block_until_ready(step(bad, state, batch))


@pytest.mark.parametrize("specs", [None, {"w": P("model")}])
def test_check_in_programs_without_shard_map(specs):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = sr.check_every(1, "data", mesh=mesh, param_specs=specs)
    grads = {"w": jnp.ones((8, 4))}
    value = np.ones((8, 4), np.float32)
    sharding = NamedSharding(mesh, P() if specs is None else specs["w"])
    index = sharding.addressable_devices_indices_map(value.shape)
    shards = [jax.device_put(value[index[d]] + (i == 7), d) for i, d in enumerate(mesh.devices.flat)]
    bad = {"w": jax.make_array_from_single_device_arrays(value.shape, sharding, shards)}
    update = jax.jit(lambda grads, params: tx.update(grads, sr.CheckEveryState(jnp.int32(4)), params)[0])
    jax.block_until_ready(update(grads, {"w": jax.device_put(value, sharding)}))
    with pytest.raises(Exception, match="parameters differ: 'w' on worker 3"):
        jax.block_until_ready(update(grads, bad))


def test_mistakes():
    with pytest.raises(ValueError, match=r"num_steps=0: expected 1 or more"):
        sr.check_every(0, "data")
    mesh = data_mesh(2)
    with pytest.raises(ValueError, match=r"the mesh has no axis \['model'\]"):
        sr.check_every(1, "model", mesh=mesh)
    tx = sr.check_every(5, "data")
    with pytest.raises(ValueError, match=r"params=None: with sr\.check_every\(5, \.\.\), call update"):
        jax.vmap(lambda g: tx.update(g, tx.init(g))[0], axis_name="data")(jnp.ones((2, 4)))
    with pytest.raises(ValueError, match="the step counter of check_every varies over data"):
        each_worker("shard_map", lambda x: tx.update(x, sr.CheckEveryState(x[0].astype(int)), x)[0], 2)(
            jnp.ones((2, 4))
        )
    with pytest.raises(ValueError, match="no axis 'batch' is bound"):
        jax.vmap(lambda x: sr.check_replicas(x, "batch"), axis_name="data")(jnp.ones(2))


def test_a_mesh_axis_that_is_not_manual():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = sr.check_every(1, "data")

    def step(x):
        return tx.update(x[0], sr.CheckEveryState(jnp.int32(0)), x[0])[0]

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P(), axis_names={"data"})
    with pytest.raises(
        ValueError, match=r"check_every\) cannot be compared here: the mesh axes \['model'\] are not manual"
    ):
        jax.jit(mapped)(jnp.ones((4, 2000)))
