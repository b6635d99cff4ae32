"""What a compressor with state per worker gets from the rest of the library, without a line elsewhere."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._checks.processes import first_difference
from jax_skipreduce._compressors.skip import Skip
from jax_skipreduce._compressors.skipreduce import SkipReduce
from jax_skipreduce._transform.configuration import fingerprint
from jax_skipreduce._transform.registry import METHODS, register
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._transform.transformation import transformation
from tests.helpers import bits, collectives, data_mesh, normal
from tests.seams.toys import Halves, HalvesMethod

N = 4
PARAMS = {"a": jnp.zeros((10, 3)), "b": jnp.zeros(7), "c": jnp.zeros(2)}


def gradients(num_steps):
    """Small integers, so that sums are exact: of each step, stacked by worker."""
    rng = np.random.default_rng(0)
    draw = lambda leaf: jnp.asarray(rng.integers(-8, 8, (num_steps, N, *leaf.shape)).astype(np.float32))  # noqa: E731
    return jax.tree.map(draw, PARAMS)


def expected_means(grads, num_steps):
    """By NumPy: leaves of 5 elements and more are halved, the rest is reduced in full."""
    rest = {name: np.zeros((N, leaf[0, 0].size), np.float32) for name, leaf in grads.items()}
    steps = []
    for step in range(num_steps):
        means = {}
        for name, leaf in grads.items():
            flat = np.asarray(leaf[step]).reshape(N, -1)
            if flat.shape[1] < 5:
                means[name] = flat.mean(0)
                continue
            whole, size = flat + rest[name], flat.shape[1]
            half = -(-size // 2)
            start = 0 if step % 2 == 0 else size - half
            means[name] = np.zeros(size, np.float32)
            means[name][start : start + half] = whole[:, start : start + half].sum(0) / N
            rest[name] = whole
            rest[name][:, start : start + half] = 0
        steps.append({name: mean.reshape(PARAMS[name].shape) for name, mean in means.items()})
    return steps, {name: rows.reshape(N, *PARAMS[name].shape) for name, rows in rest.items()}


def in_shard_map(tx, check_vma):
    mesh = data_mesh(N)
    with jax.set_mesh(mesh):
        state = tx.init(PARAMS)
    specs = sr.state_specs(state, "data")
    state = jax.device_put(state, jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), specs))

    @functools.partial(jax.jit, donate_argnums=1)
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(P("data"), specs), out_specs=(P(), specs), check_vma=check_vma
    )
    def step(grads, state):
        return tx.update(jax.tree.map(lambda leaf: leaf[0], grads), state, PARAMS)

    return step, state


def in_vmap(tx):
    with jax.set_mesh(data_mesh(N)):
        state = tx.init(PARAMS)
    axes = jax.tree.map(
        lambda spec: 0 if len(spec) else None, sr.state_specs(state, "data"), is_leaf=lambda x: isinstance(x, P)
    )
    mapped = jax.jit(jax.vmap(lambda g, s: tx.update(g, s), in_axes=(0, axes), out_axes=(0, axes), axis_name="data"))

    def step(grads, state):
        means, state = mapped(grads, state)
        assert all(bits(mean[0]) == bits(mean[-1]) for mean in jax.tree.leaves(means))
        return jax.tree.map(lambda mean: mean[0], means), state

    return step, state


def in_pmap(tx):
    devices = jax.devices()[:N]
    state = jax.pmap(lambda _: tx.init(PARAMS), axis_name="data", devices=devices)(jnp.arange(N))
    mapped = jax.pmap(lambda g, s: tx.update(g, s), axis_name="data", devices=devices)

    def step(grads, state):
        means, state = mapped(grads, state)
        return jax.tree.map(lambda mean: mean[0], means), state

    return step, state


def in_pjit(tx):
    return jax.jit(lambda grads, state: tx.update(grads, state, PARAMS)), tx.init(PARAMS)


def runners():
    mesh = data_mesh(N)
    method = HalvesMethod("data", min_size=5)
    return {
        "shard_map": lambda: in_shard_map(method.transform(), True),
        "shard_map_unchecked": lambda: in_shard_map(method.transform(), False),
        "vmap": lambda: in_vmap(method.transform()),
        "pmap": lambda: in_pmap(method.transform()),
        "pjit": lambda: in_pjit(HalvesMethod("data", min_size=5, mesh=mesh).transform()),
    }


@pytest.mark.parametrize("runner", runners())
def test_a_compressor_with_state_per_worker(runner):
    step, state = runners()[runner]()
    num_steps = 3
    grads = gradients(num_steps)
    expected, rest = expected_means(grads, num_steps)
    for number in range(num_steps):
        before = state
        means, state = step(jax.tree.map(lambda leaf: leaf[number], grads), state)  # noqa: B023
        for name, mean in means.items():
            np.testing.assert_array_equal(mean, expected[number][name])
    assert np.asarray(state.num_reductions).reshape(-1)[0] == num_steps
    if runner.startswith("shard_map"):
        assert before.per_worker[0]["rest"].is_deleted()  # donated
    a, b, c = state.per_worker
    np.testing.assert_array_equal(a["rest"].reshape(N, 10, 3), rest["a"])
    np.testing.assert_array_equal(b["rest"].reshape(N, 7), rest["b"])
    assert c is None


def test_nothing_recompiles():
    step, state = in_shard_map(HalvesMethod("data", min_size=5).transform(), True)
    grads = gradients(1)
    for _ in range(3):
        _, state = step(jax.tree.map(lambda leaf: leaf[0], grads), state)
    assert step._cache_size() == 1


def test_state_of_tensor_parallel_parameters():
    """Shards are halved by themselves; each has rows of its own, in pjit programs and inside shard_map."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = {"w": P(None, "model"), "v": P()}
    params = {"w": jnp.zeros((3, 8)), "v": jnp.zeros(6)}
    tx = HalvesMethod("data", min_size=1, mesh=mesh, param_specs=specs).transform()
    state = tx.init(params)
    v, w = state.per_worker
    assert (v["rest"].shape, w["rest"].shape) == ((2, 6), (4, 3, 4))
    grads = {"w": normal((2, 3, 8)), "v": normal((2, 6))}
    update = jax.jit(lambda g, s: tx.update(g, s, params))
    means, state = update(grads, state)
    for part in range(2):
        shard = np.asarray(grads["w"])[:, :, 4 * part : 4 * part + 4].mean(0).reshape(-1)
        got = np.asarray(means["w"])[:, 4 * part : 4 * part + 4].reshape(-1)
        np.testing.assert_allclose(got[:6], shard[:6], rtol=1e-6)
        np.testing.assert_array_equal(got[6:], 0)
    assert gathered(update, grads, state) <= {"s32[2]", "s32[1,2]", "s32[2,1]"}  # the places of the halves

    # The same inside of a shard_map over the data axis alone.
    partial = HalvesMethod("data", min_size=1, param_specs=specs).transform()
    with jax.set_mesh(mesh):
        other = partial.init(params)
    row_specs = sr.state_specs(other, "data")
    mapped = jax.shard_map(
        lambda g, s: partial.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=(P("data"), row_specs),
        out_specs=(P(), row_specs),
        axis_names={"data"},
    )
    inside, other = jax.jit(mapped)(grads, other)
    assert jax.tree.map(bits, inside) == jax.tree.map(bits, means)
    assert jax.tree.map(bits, other) == jax.tree.map(bits, state)


def gathered(jitted, *args):
    text = jitted.lower(*args).compile().as_text()
    return {shape.split("{")[0] for shape, operation in collectives(text) if operation == "all-gather"}


def test_state_where_all_axes_are_manual():
    """Each shard has rows of its own; a parameter that is not sharded has one for each worker."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    specs = {"w": P(None, "model"), "v": P()}
    tx = HalvesMethod("data", min_size=1).transform()
    params = {"w": jnp.ones((3, 8)), "v": jnp.ones(6)}
    with jax.set_mesh(mesh):
        row_specs = sr.state_specs(jax.eval_shape(tx.init, params), "data", specs)
    state = jax.jit(jax.shard_map(tx.init, mesh=mesh, in_specs=(specs,), out_specs=row_specs))(params)
    v, w = state.per_worker
    assert (v["rest"].shape, w["rest"].shape) == ((2, 6), (4, 3, 4))
    step = jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=mesh,
        in_specs=(jax.tree.map(lambda spec: P("data", *spec), specs, is_leaf=lambda x: isinstance(x, P)), row_specs),
        out_specs=(specs, row_specs),
    )
    grads = {"w": normal((2, 3, 8)), "v": normal((2, 6))}
    means, after = jax.jit(step)(grads, state)
    pjit = HalvesMethod("data", min_size=1, mesh=mesh, param_specs=specs).transform()
    expected, _ = jax.jit(lambda g, s: pjit.update(g, s, params))(grads, pjit.init(params))
    assert jax.tree.map(bits, means) == jax.tree.map(bits, expected)
    with pytest.raises(ValueError, match="param_specs has 1 PartitionSpecs, and the state entries for 2 parameters"):
        sr.state_specs(after, "data", {"w": P()})


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_rows_lie_where_they_belong(axis_type):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    sharding = jax.NamedSharding(mesh, P(None, "model"))
    params = {"w": jax.device_put(jnp.ones((3, 8)), sharding)}
    with jax.set_mesh(mesh):
        tx = HalvesMethod("data", min_size=1, param_specs={"w": P(None, "model")}).transform()
        (w,) = tx.init(params).per_worker
        assert {shard.data.shape for shard in w["rest"].addressable_shards} == {(1, 3, 4)}
        (typed,) = HalvesMethod("data", min_size=1).transform().init(params).per_worker
        assert typed["rest"].shape == ((8, 3, 4) if axis_type == AxisType.Explicit else (4, 3, 8))
    (stacked,) = HalvesMethod("data", min_size=1, mesh=mesh, param_specs=P()).transform().init(params).per_worker
    assert {shard.data.shape for shard in stacked["rest"].addressable_shards} == {(1, 3, 8)}
    # Inside of a shard_map over the data axis alone, too.
    specs = sr.state_specs(sr.SkipReduceState(None, (w,)), "data")
    mapped = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs, axis_names={"data"})
    assert jax.jit(mapped)(params).per_worker[0]["rest"].shape == (8, 3, 4)


def test_no_state_is_lost_without_a_word():
    method = HalvesMethod("data", min_size=5)
    step, state = in_shard_map(method.transform(), True)
    grads = jax.tree.map(lambda leaf: leaf[0], gradients(1))
    _, state = step(grads, state)
    for tx in (sr.skipreduce("data"), HalvesMethod("data", min_size=100).transform()):
        with pytest.raises(ValueError, match=r"the state holds what workers keep .* it would be lost"):
            jax.vmap(lambda g, s, tx=tx: tx.update(g, s), in_axes=(0, None), axis_name="data")(grads, state)
    with pytest.raises(ValueError, match="opt_state holds 2 states that workers keep"):
        method.resize_state((state, state), PARAMS, 2)
    with pytest.raises(ValueError, match=r"the state for 'a' has shapes .* expected rows of"):
        method.resize_state(state, PARAMS | {"a": jnp.zeros((9, 3))}, 2)
    with pytest.raises(ValueError, match="has dtype float32, and gradients want bfloat16"):
        step(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), grads), state)
    with pytest.raises(ValueError, match="fast_axes='node': halves keeps state per worker"):
        Settings("data", Halves(), fast_axes="node")


def test_checkpoints(tmp_path):
    method = HalvesMethod("data", min_size=5)
    step, state = in_shard_map(method.transform(), True)
    grads = gradients(4)
    at = lambda number: jax.tree.map(lambda leaf: leaf[number], grads)  # noqa: E731
    for number in range(2):
        _, state = step(at(number), state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    # The same N: the same bits.
    expected, _ = step(at(2), state)
    again, after = step(at(2), restored)
    assert jax.tree.map(bits, again) == jax.tree.map(bits, expected)
    # Another N: by the compressor's rule, here the sum stays.
    fewer = method.resize_state(after, PARAMS, 2)
    assert fewer.per_worker[0]["rest"].shape == (2, 10, 3)
    np.testing.assert_array_equal(fewer.per_worker[0]["rest"].sum(0), after.per_worker[0]["rest"].sum(0))
    assert int(fewer.num_reductions) == 3
    # Nothing is lost in silence: the state of another N is refused.
    specs, tx = sr.state_specs(after, "data"), method.transform()
    on_two = jax.shard_map(
        lambda g, s: tx.update(jax.tree.map(lambda x: x[0], g), s),
        mesh=data_mesh(2),
        in_specs=(P("data"), specs),
        out_specs=(P(), specs),
    )
    two = jax.tree.map(lambda leaf: leaf[:2], at(0))
    with pytest.raises(ValueError, match=r"the state of halves for 'a' has shape \(2, 10, 3\) on a worker: expected"):
        on_two(two, jax.device_get(after))


def test_state_wants_the_number_of_workers():
    with pytest.raises(ValueError, match=r"halves keeps state per worker, and how many workers .* jax\.set_mesh"):
        HalvesMethod("data").transform().init(PARAMS)


def test_a_rule_that_is_missing_is_said():
    with pytest.raises(ValueError, match="skipreduce has no rule for its state at another number of workers"):
        Skip().resize({}, 3)
    state = sr.skipreduce("data").init(PARAMS)
    assert SkipReduce("data").resize_state(state, PARAMS, 3) == state  # a counter


def test_a_compressor_in_describe_and_metrics():
    method = HalvesMethod("data", min_size=5, protect=sr.by_path("^b$"))
    description = method.describe(PARAMS, N)
    assert [leaf.treatment for leaf in description.leaves] == ["halved", "protected", "small"]
    # 15 of 30 elements in slices of 4, 6 steps.
    assert description.leaves[0].wire_bytes == 6 * 4 * 4
    assert "4 workers, halves, in 1 bucket(s)." in str(description)
    with jax.set_mesh(data_mesh(N)):
        state = method.transform().init(PARAMS)
    assert sr.metrics(state, PARAMS, N, method)["halves/bytes_sent"] == description.wire_bytes


def test_bytes_of_a_compressor_are_those_of_the_lowered_program():
    method = HalvesMethod("data", min_size=5)
    step, state = in_shard_map(method.transform(), False)
    grads = jax.tree.map(lambda leaf: leaf[0], gradients(1))
    text = step.lower(grads, state).compile().as_text()
    reduced = [shape for shape, operation in collectives(text) if operation == "all-reduce"]
    sizes = sorted(int(size) for shape in reduced for size in re.findall(r"f32\[(\d+)\]", shape))
    # 2(N-1) slices of each vector that is summed: of both halves, and of the leaf that is reduced in full.
    assert [2 * (N - 1) * -(-size // N) * 4 for size in sizes] == sorted(
        leaf.wire_bytes for leaf in method.describe(PARAMS, N).leaves
    )


def test_a_compressor_in_the_comparison_of_configurations():
    one, other = (fingerprint(HalvesMethod("data", scale=scale).settings, PARAMS) for scale in (1.0, 2.0))
    assert first_difference(one, other) == "scale is 1.0 on the first and 2.0 on the second"
    skip = fingerprint(SkipReduce("data").settings, PARAMS)
    assert first_difference(skip, one) == "compressor is skipreduce on the first and halves on the second"
    # Functions count by what they say, arrays by all that they hold.
    said = [
        Scheduled(rate=rate).fingerprint(PARAMS)[0]["rate"]
        for rate in (lambda count: 0.5, lambda count: 1 / 2, lambda count: count / 4, np.arange(2000), np.ones(2000))
    ]
    assert said[0] == said[1]
    assert len(set(said)) == 4


@dataclasses.dataclass(frozen=True)
class Scheduled(Halves):
    rate: object = None


def test_methods_by_name():
    register(HalvesMethod)
    try:
        assert METHODS["halves"]("data").settings.compressor.name == "halves"
        with pytest.raises(ValueError, match="there is a method 'halves' already"):
            register(HalvesMethod)
    finally:
        del METHODS["halves"]
    assert METHODS["skipreduce"] is SkipReduce


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_state_made_outside_and_inside_is_taken_by_the_step(axis_type):
    """In a shard_map over the data axis alone: by `param_specs`, and by types where the model axis is Explicit."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    spec = P(None, "model")
    params = {"w": jax.device_put(jnp.ones((3, 8)), jax.NamedSharding(mesh, spec))}
    grads = jax.device_put(normal((4, 3, 8)), jax.NamedSharding(mesh, P("data", None, "model")))
    means = []
    with jax.set_mesh(mesh):
        for param_specs in ({"w": spec}, None) if axis_type == AxisType.Explicit else ({"w": spec},):
            tx = HalvesMethod("data", min_size=1, param_specs=param_specs).transform()
            outside = tx.init(params)
            specs = sr.state_specs(outside, "data")
            over_data = functools.partial(jax.shard_map, mesh=mesh, axis_names={"data"})
            inside = jax.jit(over_data(tx.init, in_specs=P(), out_specs=specs))(params)
            step = over_data(
                lambda g, s, tx=tx: tx.update({"w": g[0]}, s), in_specs=(P("data"), specs), out_specs=(P(), specs)
            )
            for state in (outside, inside):
                mean, state = jax.jit(step)(grads, state)
                mean, state = jax.jit(step)(grads, state)
                means.append(mean)
    assert len({bits(mean["w"]) for mean in means}) == 1


@dataclasses.dataclass(frozen=True)
class Widening(Halves):
    """Gives back states in another dtype."""

    def reduce(self, bucket, states, plan, group):
        means, kept = super().reduce(bucket, states, plan, group)
        return means, [{**state, "turn": state["turn"].astype(jnp.float32)} for state in kept]


def test_a_compressor_that_changes_its_state_is_named():
    settings = Settings("data", Widening(), min_size=1)
    with jax.set_mesh(data_mesh(N)):
        state = transformation(settings).init(jnp.zeros(6))
    with pytest.raises(ValueError, match=r"halves keeps float32\[\] after the step, and kept int32\[\] before"):
        jax.vmap(
            lambda g, rows: transformation(settings).update(g, sr.SkipReduceState(jnp.int32(0), rows)), axis_name="data"
        )(jnp.ones((N, 6)), state.per_worker)
