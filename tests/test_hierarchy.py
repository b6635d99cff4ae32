"""Reduced in full over fast axes, with skipping over slow ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from tests.helpers import bits, collectives, contributors, normal

AXES = ("dcn", "ici")


def mesh_of(num_slow, num_fast, names=AXES):
    shape = {"dcn": num_slow, "ici": num_fast}
    return jax.make_mesh([shape[name] for name in names], names, axis_types=(AxisType.Auto,) * 2)


def stacked(mesh, shape, values):
    """`values`, a function of (slow rank, fast rank), as gradients, one row per worker in the order of the mesh."""
    rows = []
    for index in np.ndindex(*mesh.devices.shape):
        at = dict(zip(mesh.axis_names, index, strict=True))
        rows.append(np.full(shape, values(at["dcn"], at["ici"]), np.float32))
    return np.stack(rows)


def one_update(mesh, tx, count=0, check_vma=True):
    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(), check_vma=check_vma)
    def run(grads):
        return tx.update(jax.tree.map(lambda leaf: leaf[0], grads), sr.SkipReduceState(jnp.int32(count)))[0]

    return run


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("names", [AXES, AXES[::-1]])
@pytest.mark.parametrize(("num_slow", "num_fast"), [(2, 4), (4, 2), (8, 1), (1, 8)])
def test_contributors_are_those_of_the_paper_among_slow_workers_and_all_fast_ones(num_slow, num_fast, names, check_vma):
    mesh = mesh_of(num_slow, num_fast, names)
    grads = stacked(mesh, (8 * 3,), lambda slow, fast: 2.0 ** (slow * num_fast + fast))
    for k in range(num_slow):
        tx = sr.skipreduce("dcn", k / num_slow, mode="static", min_size=1, fast_axes="ici")
        mean = np.asarray(one_update(mesh, tx, check_vma=check_vma)(grads))
        shift = 0 if k else -1
        # Fast worker m has part m of the array, and each part is cut in slices of its own.
        sums = [
            sum(
                2.0 ** (slow * num_fast + fast)
                for slow in contributors(j, num_slow, k, shift)
                for fast in range(num_fast)
            )
            for _ in range(num_fast)
            for j in range(num_slow)
        ]
        np.testing.assert_array_equal(mean, np.repeat(sums, 3) / 8)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_nothing_skipped_is_pmean_over_both(dtype):
    mesh = mesh_of(2, 4)
    grads = {"a": normal((8, 37, 5), dtype), "b": normal((8, 11), dtype, seed=1), "c": normal((8, 3), jnp.int32)}
    tx = sr.skipreduce("dcn", 0.0, min_size=8, fast_axes="ici")
    mean = one_update(mesh, tx)(grads)
    for name, leaf in grads.items():
        expected = np.asarray(leaf, np.float64).mean(0)
        tolerance = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}.get(str(leaf.dtype), 1e-6)
        np.testing.assert_allclose(np.asarray(mean[name], np.float64), expected, rtol=tolerance, atol=tolerance)


def test_drop_divides_by_the_contributors_of_the_slow_axis():
    mesh = mesh_of(4, 2)
    tx = sr.skipreduce("dcn", 0.5, normalize="drop", min_size=1, fast_axes="ici")
    np.testing.assert_array_equal(one_update(mesh, tx, count=3)(np.ones((8, 50), np.float32)), np.ones(50))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 1001])
def test_sizes_that_do_not_divide(size):
    mesh = mesh_of(2, 4)
    grads = np.ones((8, size), np.float32)
    tx = sr.skipreduce("dcn", 0.5, normalize="drop", min_size=1, fast_axes="ici")
    np.testing.assert_array_equal(one_update(mesh, tx)(grads), np.ones(size))


def test_what_is_sent():
    mesh, num_elements = mesh_of(4, 2), 8 * 1000
    tx = sr.skipreduce("dcn", 0.5, mode="static", min_size=1, fast_axes="ici")
    text = one_update(mesh, tx).lower(np.ones((8, num_elements), np.float32)).compile().as_text()
    sent = sorted((operation, shape.split("{")[0]) for shape, operation in collectives(text))
    part, piece = num_elements // 2, num_elements // 8
    assert sent == sorted(
        [
            ("collective-permute", f"f32[{part}]"),  # the fast axis, around a ring of two
            ("collective-permute", f"f32[{piece}]"),
            ("all-gather", f"f32[4,{piece}]"),
            ("all-gather", f"f32[2,{part}]"),
        ]
    ), sent


def test_several_fast_axes_in_any_order():
    mesh = jax.make_mesh((2, 2, 2), ("x", "dcn", "y"), axis_types=(AxisType.Auto,) * 3)
    grads = normal((8, 100))

    def mean(fast):
        tx = sr.skipreduce("dcn", 0.5, min_size=1, fast_axes=fast)
        return jax.jit(
            jax.shard_map(
                lambda g: tx.update(g[0], sr.SkipReduceState(jnp.int32(5)))[0],
                mesh=mesh,
                in_specs=P(("x", "dcn", "y")),
                out_specs=P(),
            )
        )(grads)

    assert bits(mean(("x", "y"))) == bits(mean(("y", "x")))
    full = sr.skipreduce("dcn", 0.0, min_size=1, fast_axes=("y", "x"))
    result = jax.jit(
        jax.shard_map(
            lambda g: full.update(g[0], sr.SkipReduceState(jnp.int32(0)))[0],
            mesh=mesh,
            in_specs=P(("x", "dcn", "y")),
            out_specs=P(),
        )
    )(grads)
    np.testing.assert_allclose(result, np.asarray(grads).mean(0), rtol=1e-5, atol=1e-6)


def test_programs_without_shard_map():
    mesh = mesh_of(2, 4)
    params = {"w": jnp.zeros((33, 5))}
    grads = {"w": normal((8, 33, 5))}
    tx = sr.skipreduce("dcn", 0.5, min_size=1, fast_axes="ici", mesh=mesh)
    inside = sr.skipreduce("dcn", 0.5, min_size=1, fast_axes="ici")
    state = sr.SkipReduceState(jnp.int32(4))
    mean = jax.jit(lambda grads: tx.update(grads, state, params)[0])(grads)
    assert bits(mean["w"]) == bits(one_update(mesh, inside, count=4)(grads)["w"])


@pytest.mark.native
def test_the_bits_of_the_ring_through_the_kernels():
    mesh = mesh_of(4, 2)
    grads = {"a": normal((8, 371)), "b": normal((8, 50, 2), jnp.bfloat16)}

    def mean(backend):
        tx = sr.skipreduce("dcn", 0.5, min_size=1, fast_axes="ici", wire_dtype="bfloat16", backend=backend)
        return jax.tree.map(bits, one_update(mesh, tx, count=2)(grads))

    assert mean("xla") == mean("native")


def test_describe_counts_the_slow_axis():
    params = {"w": jnp.zeros((100, 80)), "b": jnp.zeros(10)}
    tx = sr.SkipReduce("dcn", 0.5, fast_axes="ici", mesh=mesh_of(4, 2))
    description = sr.describe(params, 4, tx)
    # A part of 4000 elements per fast worker, four slices of it; 2 of 3 scatter steps skipped, 3 gather steps.
    assert description.leaves[1].wire_bytes == 4 * 1000 * 4
    assert description.leaves[1].full_wire_bytes == 6 * 1000 * 4
    assert description.leaves[0].wire_bytes == 6 * 2 * 4
    assert "2 fast workers" in str(description)
    with_settings = sr.describe(params, 4, skip_ratio=0.5, fast_axes="ici", num_fast_workers=2)
    assert with_settings == description
    with pytest.raises(ValueError, match="num_fast_workers=3: the mesh has 2"):
        sr.describe(params, 4, tx, num_fast_workers=3)
    with pytest.raises(ValueError, match=r"fast_axes=.*: how many workers .* num_fast_workers"):
        sr.describe(params, 4, skip_ratio=0.5, fast_axes="ici")
    with pytest.raises(ValueError, match=r"num_fast_workers=2: .* no fast_axes"):
        sr.describe(params, 4, skip_ratio=0.5, num_fast_workers=2)


def test_mistakes():
    with pytest.raises(ValueError, match="ici is in axis_name='ici', too"):
        sr.skipreduce("ici", fast_axes="ici")
    with pytest.raises(ValueError, match=r"fast_axes='pcie': the mesh has no axis \['pcie'\]"):
        sr.skipreduce("dcn", fast_axes="pcie", mesh=mesh_of(2, 4))
    mesh = mesh_of(2, 4)
    tx = sr.skipreduce("dcn", fast_axes="ici", min_size=1)
    with pytest.raises(ValueError, match=r"gradient .* is already the same on all workers of 'ici'"):
        jax.shard_map(
            lambda g: tx.update(lax.pmean(g[0], "ici"), sr.SkipReduceState(jnp.int32(0)))[0],
            mesh=mesh,
            in_specs=P(AXES),
            out_specs=P(),
        )(jnp.ones((8, 64)))
    with pytest.raises(ValueError, match="no axis 'pcie' is bound here"):
        one_update(mesh, sr.skipreduce("dcn", fast_axes="pcie"))(np.ones((8, 64), np.float32))
