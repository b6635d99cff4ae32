import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._topologies.ring import RING
from tests.helpers import collectives, each_worker, powers_of_two, replicated_step

PARAMS = {
    "conv": {"kernel": jnp.zeros((3, 3, 8, 16)), "bias": jnp.zeros(16)},
    "dense": jnp.zeros((100, 21), jnp.bfloat16),
    "steps": jnp.zeros(5, jnp.int32),
    "nothing": None,
}


def by_path(description):
    return {leaf.path: leaf for leaf in description.leaves}


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.99])
def test_bytes_are_those_of_the_schedule(num_workers, ratio):
    description = sr.describe(PARAMS, num_workers, skip_ratio=ratio)
    leaves = by_path(description)
    k = description.num_skipped
    kernel_slice = -(-3 * 3 * 8 * 16 // num_workers) * 4
    assert leaves["conv/kernel"].wire_bytes == RING.schedule(num_workers, k).slices_sent()[0] * kernel_slice
    assert leaves["conv/kernel"].full_wire_bytes == RING.schedule(num_workers).slices_sent()[0] * kernel_slice
    dense_slice = -(-2100 // num_workers) * 2
    assert leaves["dense"].wire_bytes == (2 * (num_workers - 1) - k) * dense_slice
    assert leaves["conv/bias"].treatment == "small"
    assert leaves["conv/bias"].wire_bytes == leaves["conv/bias"].full_wire_bytes
    assert leaves["steps"].treatment == "integer"
    assert description.wire_bytes == sum(leaf.wire_bytes for leaf in description.leaves)
    if num_workers == 1:
        assert description.theoretical_speedup == 1
        assert description.wire_bytes == 0


def test_bytes_are_those_of_the_compiled_program():
    grads = {"a": jnp.zeros((8, 65, 33)), "b": jnp.zeros((8, 1100), jnp.bfloat16), "bias": jnp.zeros((8, 7))}
    method = sr.SkipReduce("data", 0.5)
    tx = method.transform()
    run = replicated_step(lambda g: tx.update(g, tx.init(None))[0], 8)
    description = sr.describe(jax.tree.map(lambda x: x[0], grads), 8, method)
    sent = 0
    for shape, operation in collectives(run.lower(grads).compile().as_text()):
        if operation == "all-reduce":
            continue  # of the small leaf
        dtype, dimensions = shape.split("{")[0].rstrip("]").split("[")
        num_bytes = int(np.prod([int(n) for n in dimensions.split(",")])) * {"f32": 4, "u16": 2}[dtype]
        # An all-gather's type is its result, of which a worker sends N-1 of N parts.
        sent += num_bytes if operation == "collective-permute" else num_bytes * 7 // 8
    assert sent == description.wire_bytes - by_path(description)["bias"].wire_bytes


def test_skipped_elements_are_those_that_are_left_out():
    description = sr.describe({"w": jnp.zeros(13)}, 8, skip_ratio=0.5, min_size=0)
    reduced = each_worker("vmap", lambda x: sr.all_reduce(x, "data", num_skipped=4, normalize=None), 8)(
        powers_of_two(8, 13)
    )[0]
    contributions = sum(bin(int(value)).count("1") for value in reduced)
    assert description.num_skipped_elements == (8 * 13 - contributions) / 8


def test_protect_mode_and_schedule():
    protected = sr.describe(PARAMS, 8, skip_ratio=0.5, protect=sr.by_path("dense"))
    assert by_path(protected)["dense"].treatment == "protected"
    assert by_path(protected)["dense"].num_skipped_elements == 0
    dropout = sr.describe(PARAMS, 8, skip_ratio=0.5, mode="dropout")
    assert dropout.theoretical_speedup == 1
    assert by_path(dropout)["dense"].num_skipped_elements == 2100 * 0.5 * 7 / 8
    warm_up = sr.SkipReduce("data", optax.linear_schedule(0.0, 0.5, 100))
    assert [sr.describe(PARAMS, 8, warm_up, count=count).num_skipped for count in (0, 50, 100)] == [0, 2, 4]


def test_shapes_are_enough_and_buckets_are_counted():
    shapes = jax.eval_shape(lambda: {"a": jnp.zeros((1000, 1000)), "b": jnp.zeros((1000, 1000))})
    assert sr.describe(shapes, 8).num_buckets == 1
    assert sr.describe(shapes, 8, bucket_bytes=4_000_000).num_buckets == 2
    assert sr.describe(shapes, 8, skip_ratio=0.5).theoretical_speedup == pytest.approx(14 / 10)
    assert sr.describe({}, 8).num_elements == 0
    assert "total" in str(sr.describe({}, 8))


def test_shards():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    tx = sr.SkipReduce("data", mesh=mesh, param_specs={"w": P(None, "model"), "v": P()})
    leaves = by_path(sr.describe({"w": jnp.zeros((40, 80)), "v": jnp.zeros(4000)}, 4, tx))
    assert leaves["w"].shape == (40, 40)
    assert leaves["v"].shape == (4000,)
    assert leaves["w"].full_wire_bytes == 6 * 400 * 4


def test_shards_of_other_kinds():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    weights = {"w": jax.device_put(jnp.zeros((40, 80)), NamedSharding(mesh, P(None, "model"))), "v": jnp.zeros(4000)}
    # With Explicit axes, types say it.
    description = sr.describe(weights, 4, sr.SkipReduce("data", mesh=mesh))
    assert by_path(description)["w"].shape == (40, 40)
    # Two rings: what varies over the model axis is not joined with what does not.
    assert description.num_buckets == 2
    # In a shard_map over the data axis alone, the mesh is the one that is set.
    partial = sr.SkipReduce("data", param_specs={"w": P(None, "model"), "v": P()})
    with pytest.raises(ValueError, match=r"call this in a context of jax.set_mesh\(mesh\)"):
        sr.describe(weights, 4, partial)
    with jax.set_mesh(mesh):
        assert by_path(sr.describe(weights, 4, partial))["w"].shape == (40, 40)
    with pytest.raises(ValueError, match="num_workers=8: the mesh has 4 workers along 'data'"):
        sr.describe(weights, 8, sr.SkipReduce("data", mesh=mesh))


def test_table():
    text = str(sr.describe(PARAMS, 8, skip_ratio=0.5, min_size=100))
    lines = text.splitlines()
    assert " ".join(lines[0].split()) == "gradient shape dtype sent as treatment elements skipped bytes sent in full"
    kernel = next(line for line in lines if line.startswith("conv/kernel"))
    assert kernel.split()[-4:] == ["1,152", "576", "5,760", "8,064"]
    assert lines[-2] == "8 workers, skip_ratio 0.5: 4 of 7 reduce-scatter steps skipped, in 2 bucket(s)."
    assert "(at step 3 of the schedule)" in str(sr.describe(PARAMS, 8, skip_ratio=lambda count: 0.25, count=3))
    assert "one step is a ratio of 0.125" in str(sr.describe(PARAMS, 8, skip_ratio=0.05))


def test_protect_that_names_nothing_is_said():
    text = "protect names no leaf"
    assert text in str(sr.describe(PARAMS, 8, protect=sr.by_path("^Conv")))
    assert text not in str(sr.describe(PARAMS, 8, protect=sr.by_path("^conv")))
    assert text not in str(sr.describe(PARAMS, 8))


def test_paths_of_nnx_are_those_that_optax_sees():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    state = nnx.state(model, nnx.Param)
    assert list(by_path(sr.describe(state, 8))) == list(by_path(sr.describe(nnx.to_pure_dict(state), 8)))


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"num_workers=Grad.*expected an int, as in sr.describe\(params, 8, method\)"):
        sr.describe(PARAMS, optax.sgd(0.1))
    with pytest.raises(ValueError, match="num_workers=0: expected at least 1"):
        sr.describe(PARAMS, 0)
    with pytest.raises(TypeError, match="method and skip_ratio: give the method or its settings"):
        sr.describe(PARAMS, 8, sr.SkipReduce("data"), skip_ratio=0.5)
    with pytest.raises(TypeError, match=r"does not know them, alone or in a chain"):
        sr.describe(PARAMS, 8, optax.chain(sr.skipreduce("data"), optax.sgd(0.1)))
    with pytest.raises(ValueError, match="skip_ratio=2"):
        sr.describe(PARAMS, 8, skip_ratio=2)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'ratio': expected arguments of skipreduce"):
        sr.describe(PARAMS, 8, ratio=0.5)
    with pytest.raises(TypeError, match=r"method is a float: expected settings, such as sr\.SkipReduce"):
        sr.describe(PARAMS, 8, 0.5)
