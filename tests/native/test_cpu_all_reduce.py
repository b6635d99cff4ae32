"""The custom call between the CPU devices of one process: the bits of the ring, whatever the program around it."""

import functools
import itertools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._backends import ffi as _ffi
from tests.helpers import (
    bits,
    by_reference,
    count_collectives,
    data_mesh,
    each_worker,
    expected_sum,
    normal,
    powers_of_two,
    replicated_step,
)

pytestmark = pytest.mark.native

TARGET = _ffi._CPU_TARGET

RUNNERS = ("shard_map", "shard_map_unchecked")
# Of the array, and on the wire.
DTYPES = (
    *((jnp.float32, None), (jnp.float32, "bfloat16"), (jnp.float32, "float16"), (jnp.bfloat16, None)),
    *((jnp.float16, None), (jnp.float16, "bfloat16"), (jnp.bfloat16, "float32")),
)


def both_ways(function, num_workers, runner="shard_map"):
    """`function` of (x, backend, *shared) -> jitted, (around the ring, native)."""

    def one(backend):
        return each_worker(runner, lambda x, *shared: function(x, backend, *shared), num_workers)

    return one("xla"), one("native")


def has_call(jitted, *args):
    return TARGET in jitted.lower(*args).as_text()


@pytest.mark.parametrize("num_workers", range(2, 9))
def test_contributors_are_those_of_the_paper(num_workers):
    x = powers_of_two(num_workers, 3 * num_workers)
    function = each_worker(
        "shard_map",
        lambda x, k, c: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=None, backend="native"),
        num_workers,
    )
    for num_skipped in range(num_workers):
        for shift in (0, 1, -2, 2**31 - 1, -(2**31)):
            expected = expected_sum(num_workers, num_skipped, shift, slice_size=3)
            for row in np.asarray(function(x, jnp.int32(num_skipped), jnp.int32(shift))):
                np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize(
    ("runner", "normalize", "dtype", "wire_dtype"),
    [
        *((*how, *dtypes) for how in itertools.product(RUNNERS, ("skip", "drop", None)) for dtypes in DTYPES),
        ("pmap", "drop", jnp.float32, "bfloat16"),  # compiles in every call, so once
    ],
)
def test_the_bits_of_the_ring(runner, normalize, dtype, wire_dtype):
    x = normal((6, 5, 29), dtype)

    def reduce(x, backend, k, c):
        options = {"normalize": normalize, "wire_dtype": wire_dtype, "backend": backend}
        return sr.all_reduce(x, "data", num_skipped=k, shift=c, **options)

    ring, native = both_ways(reduce, 6, runner)
    for num_skipped, shift in ((0, 0), (1, -1), (3, 2), (4, 7), (5, 1)):
        arguments = (x, jnp.int32(num_skipped), jnp.int32(shift))
        assert bits(ring(*arguments)) == bits(native(*arguments)), (num_skipped, shift)


@settings(max_examples=15, deadline=None)
@given(
    size=st.integers(1, 70) | st.sampled_from([4095, 4096 * 3, 4096 * 3 + 1, 50_000]),
    num_workers=st.integers(2, 8),
    skip=st.floats(0, 0.99),
    shift=st.integers(-(2**31), 2**31 - 1),
)
def test_any_size_against_the_reference(size, num_workers, skip, shift):
    x, k = normal((num_workers, size)), int(skip * num_workers)
    reduce = replicated_step(
        lambda x, c: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=None, backend="native"), num_workers
    )
    assert bits(reduce(x, jnp.int32(shift))) == bits(by_reference(x, k, shift)[0])


def test_float64():
    with jax.enable_x64(True):
        x = normal((4, 1001), jnp.float64)
        ring, native = both_ways(
            lambda x, backend: sr.all_reduce(x, "data", num_skipped=2, shift=3, normalize="drop", backend=backend), 4
        )
        assert native(x).dtype == jnp.float64
        assert bits(ring(x)) == bits(native(x))


@pytest.mark.parametrize("wire_dtype", [None, "bfloat16", "float16"])
def test_values_at_the_end_of_the_range(wire_dtype):
    values = np.array([np.nan, np.inf, -np.inf, 65504.0, 1e-40, 6e-8, 3.4e38], np.float32)
    x = np.ones((4, 4 * len(values)), np.float32)
    x[1] = np.tile(values, 4)  # in every slice
    ring, native = both_ways(
        lambda x, backend: sr.all_reduce(x, "data", num_skipped=1, wire_dtype=wire_dtype, backend=backend), 4
    )
    np.testing.assert_array_equal(np.asarray(ring(x)), np.asarray(native(x)))


def test_a_program_holds_one_call_and_no_collective():
    function = replicated_step(lambda x: sr.all_reduce(x, "data", num_skipped=3, backend="native"), 8)
    x = normal((8, 100))
    assert has_call(function, x)
    assert count_collectives(function, x) == {}


def test_results_leave_shard_map_as_replicated_and_are_the_same_everywhere():
    x = normal((8, 1000))
    mean = replicated_step(lambda x: sr.all_reduce(x, "data", num_skipped=3, shift=1, backend="native"), 8)(x)
    assert len({bits(shard.data) for shard in mean.addressable_shards}) == 1


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["a", "b", ("b", "a"), ("a", "c"), ("a", "b", "c")])
def test_groups_of_workers_meet_by_themselves(axis, check_vma):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    x = normal((8, 33))

    def run(backend):
        @jax.jit
        @functools.partial(
            jax.shard_map, mesh=mesh, in_specs=P(("a", "b", "c")), out_specs=P(("a", "b", "c")), check_vma=check_vma
        )
        def reduce(x):
            return sr.all_reduce(x[0], axis, num_skipped=1, shift=1, backend=backend)[None]

        return np.asarray(reduce(x))

    np.testing.assert_array_equal(run("xla"), run("native"))


def test_some_axes_that_are_not_manual_go_around_the_ring():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def reduce(backend):
        return jax.jit(
            jax.shard_map(
                lambda x: sr.all_reduce(x[0], "data", num_skipped=1, backend=backend),
                mesh=mesh,
                in_specs=P("data"),
                out_specs=P(),
                axis_names={"data"},
            )
        )

    x = normal((4, 32))
    assert not has_call(reduce("auto"), x)
    with pytest.raises(ValueError, match=r"backend='native': the mesh axes \['model'\] are not manual"):
        reduce("native")(x)


def test_sharded_parameters_are_reduced_shard_by_shard():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params = {"w": normal((8, 6)), "b": normal((6,))}
    specs = {"w": P(None, "model"), "b": P()}
    grads = jax.tree.map(lambda leaf: normal((4, *leaf.shape)), params)

    def mean(backend):
        tx = sr.skipreduce("data", 0.5, min_size=1, mesh=mesh, param_specs=specs, backend=backend)
        update = jax.jit(lambda grads: tx.update(grads, sr.SkipReduceState(jnp.int32(3)), params)[0])
        return update(grads), has_call(update, grads)

    (one, without), (other, with_call) = mean("xla"), mean("native")
    assert (without, with_call) == (False, True)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("ratio", [0.5, lambda count: jnp.where(count < 3, 0.0, 0.75)], ids=["float", "schedule"])
def test_training_goes_the_same_way_to_the_bit(ratio):
    shapes = {"big": (700, 31), "odd": (1231,), "small": (5,), "half": (64, 32)}
    grads = {name: normal((6, 8, *shape), seed=len(name)) for name, shape in shapes.items()}
    grads["half"] = grads["half"].astype(jnp.bfloat16)

    def train(backend):
        tx = sr.skipreduce("data", ratio, normalize="drop", bucket_bytes=50_000, backend=backend)

        @jax.jit
        @functools.partial(jax.shard_map, mesh=data_mesh(8), in_specs=P(None, "data"), out_specs=P())
        def run(grads):
            def step(state, local):
                mean, state = tx.update(jax.tree.map(lambda leaf: leaf[0], local), state)
                return state, mean

            return lax.scan(step, tx.init(None), grads)[1]

        return run(grads), has_call(run, grads)

    (one, without), (other, with_call) = train("xla"), train("native")
    assert (without, with_call) == (False, True)
    assert jax.tree.map(bits, one) == jax.tree.map(bits, other)


def test_a_thousand_iterations_of_a_loop():
    @jax.jit
    @functools.partial(jax.shard_map, mesh=data_mesh(8), in_specs=P("data"), out_specs=P("data"))
    def run(x):
        def step(x, number):
            mean = sr.all_reduce(x, "data", num_skipped=number % 8, shift=number, normalize="drop", backend="native")
            return x + 0.001 * (mean - x) + 1e-4 * lax.axis_index("data").astype(x.dtype), None

        return lax.scan(step, x, jnp.arange(1000, dtype=jnp.int32))[0]

    x = normal((800,))
    assert bits(run(x)) == bits(run(x))


def test_many_collectives_in_flight():
    """Independent calls in one program, which XLA starts in any order, and many executions at once."""
    x = normal((8, 40, 65))

    def reduce(x, backend):
        return jnp.stack([sr.all_reduce(x[i], "data", num_skipped=i % 8, shift=i, backend=backend) for i in range(40)])

    ring, native = both_ways(reduce, 8)
    expected = bits(ring(x))
    for result in [native(x) for _ in range(30)]:
        assert bits(result) == expected


def test_beside_collectives_of_xla_that_block():
    def reduce(x, backend):
        for i in range(6):
            x = sr.all_reduce(x, "data", num_skipped=i, shift=i, backend=backend) + lax.psum(x, "data") / 8
            x = x + 0.1 * lax.axis_index("data").astype(x.dtype)
        return x

    ring, native = both_ways(reduce, 8)
    x = normal((8, 513))
    expected = np.asarray(ring(x))
    for _ in range(20):
        # Not to the bit: psum adds in the order in which workers come.
        np.testing.assert_allclose(np.asarray(native(x)), expected, rtol=1e-5, atol=1e-5)


def test_an_inner_function_that_is_called_many_times():
    # XLA keeps one copy of the function, so what tells calls apart cannot be an attribute.
    inner = jax.jit(lambda x, c: sr.all_reduce(x, "data", num_skipped=2, shift=c, backend="native"))
    x = normal((32, 4, 100))
    function = each_worker("shard_map", lambda x: jnp.stack([inner(x[i], jnp.int32(i)) for i in range(32)]), 4)
    rows = np.asarray(function(x.swapaxes(0, 1)))
    for i in range(32):
        expected = by_reference(np.asarray(x[i]), 2, i)[0] / 4
        np.testing.assert_array_equal(rows[0, i], expected)


def test_two_programs_at_once():
    first = replicated_step(lambda x: sr.all_reduce(x, "data", num_skipped=1, backend="native"), 8)
    second = replicated_step(lambda x: sr.all_reduce(x, "data", num_skipped=2, shift=1, backend="native"), 4)
    x, y = normal((8, 1000)), normal((4, 3000))
    expected = bits(first(x)), bits(second(y))
    results = [(first(x), second(y)) for _ in range(20)]
    assert {(bits(one), bits(other)) for one, other in results} == {expected}


def test_donated_arrays_are_overwritten_others_are_not():
    def step(x):
        return jax.shard_map(
            lambda x: sr.skipreduce("data", 0.5, min_size=1, backend="native").update(
                x, sr.SkipReduceState(jnp.int32(0))
            )[0],
            mesh=data_mesh(8),
            in_specs=P("data"),
            out_specs=P(),
        )(x)

    x = normal((8 * 4096,))
    before = bits(x)
    kept = jax.jit(step)(x)
    assert bits(x) == before
    donated = jax.jit(lambda x: jnp.tile(step(x), 8), donate_argnums=0)(x + 0)
    np.testing.assert_array_equal(np.asarray(donated)[:4096], np.asarray(kept))


@pytest.mark.parametrize("runner", ["shard_map", "shard_map_unchecked"])
def test_derivatives(runner):
    x, tangent = normal((4, 21)), normal((4, 21), seed=1)

    def loss(x, backend):
        return sr.all_reduce(x, "data", num_skipped=1, shift=2, backend=backend)

    def derivatives(x, backend, tangent):
        forward = jax.jvp(lambda x: loss(x, backend), (x,), (tangent,))[1]
        return forward, jax.grad(lambda x: (loss(x, backend) ** 2).sum())(x)

    def run(backend):
        def local(x, tangent):
            return jax.tree.map(lambda leaf: leaf[None], derivatives(x[0], backend, tangent[0]))

        return jax.jit(
            jax.shard_map(
                local,
                mesh=data_mesh(4),
                in_specs=P("data"),
                out_specs=P("data"),
                check_vma=runner == "shard_map",
            )
        )(x, tangent)

    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-6), run("xla"), run("native"))


def _scanned(f):
    return lambda x: lax.scan(lambda carry, _: (f(carry), None), x, None, length=2)[0]


NESTED = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": _scanned,
    "cond": lambda f: lambda x: lax.cond(True, f, lambda x: x, x),
    "vmap": lambda f: lambda x: jax.vmap(f)(x[None])[0],
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("how", NESTED)
@pytest.mark.parametrize("backend", ["auto", "native"])
def test_derivatives_of_inner_functions(how, check_vma, backend, monkeypatch):
    monkeypatch.setenv("SKIPREDUCE_BACKEND", "auto")

    def gradient(backend):
        def local(x):
            def inner(x):
                mean = sr.all_reduce(x, "data", num_skipped=1, shift=2, backend=backend)
                return jnp.sin(mean) + 0 * x

            return jax.grad(lambda x: (NESTED[how](inner)(x) ** 2).sum())(x[0])[None]

        return jax.jit(
            jax.shard_map(local, mesh=data_mesh(4), in_specs=P("data"), out_specs=P("data"), check_vma=check_vma)
        )(normal((4, 21)))

    np.testing.assert_allclose(gradient(backend), gradient("xla"), rtol=1e-6)


@pytest.mark.parametrize("backend", ["auto", "native"])
def test_a_shift_that_varies_over_another_axis(backend, monkeypatch):
    monkeypatch.setenv("SKIPREDUCE_BACKEND", "auto")
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    x = normal((2, 8))

    def run(backend, out_specs):
        def local(x):
            mean = sr.all_reduce(x[0], "data", num_skipped=1, shift=lax.axis_index("model"), backend=backend)
            return mean if out_specs == P() else mean[None]

        return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=out_specs))(x)

    assert bits(run(backend, P("model"))) == bits(run("xla", P("model")))
    with pytest.raises(ValueError, match="out_specs"):
        run(backend, P())


def test_vmap_over_another_axis():
    x = normal((4, 3, 50))

    def reduce(x, backend):
        return jax.vmap(lambda x, c: sr.all_reduce(x, "data", num_skipped=2, shift=c, backend=backend))(
            x, jnp.arange(3, dtype=jnp.int32)
        )

    ring, native = both_ways(reduce, 4)
    assert bits(ring(x)) == bits(native(x))


def test_simulated_workers_go_around_the_ring():
    x = normal((4, 10))
    with pytest.raises(ValueError, match=r"backend='native': the workers of axis .*'data'.* are simulated"):
        jax.vmap(lambda x: sr.all_reduce(x, "data", backend="native"), axis_name="data")(x)
    jax.vmap(lambda x: sr.all_reduce(x, "data", backend="auto"), axis_name="data")(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "dropout", "key": jax.random.key(0)}, "dropout"),
        ({"num_gather_skipped": 1}, "num_gather_skipped"),
        ({"dtype": jnp.int32}, "int32 is not among float32, bfloat16, float16, float64"),
        ({"dtype": jnp.complex64}, "complex64 is not among"),
    ],
)
def test_what_the_kernels_cannot_do_is_said_and_goes_around_the_ring(options, message):
    options = dict(options)
    x = normal((4, 10), options.pop("dtype", jnp.float32))
    with pytest.raises(ValueError, match=message):
        each_worker("shard_map", lambda x: sr.all_reduce(x, "data", backend="native", **options), 4)(x)
    automatic = each_worker("shard_map", lambda x: sr.all_reduce(x, "data", backend="auto", **options), 4)
    assert not has_call(automatic, x)


def test_auto_takes_the_kernels(monkeypatch):
    x = normal((4, 10))

    def has(backend):
        return has_call(each_worker("shard_map", lambda x: sr.all_reduce(x, "data", backend=backend), 4), x)

    monkeypatch.delenv("SKIPREDUCE_BACKEND")
    assert [has(backend) for backend in ("auto", "xla", "native")] == [True, False, True]
    assert sr.native_info().backend == "auto"
    monkeypatch.setenv("SKIPREDUCE_BACKEND", "xla")
    assert [has(backend) for backend in ("auto", "xla", "native")] == [False, False, True]
    monkeypatch.setenv("SKIPREDUCE_BACKEND", "fast")
    with pytest.raises(ValueError, match="SKIPREDUCE_BACKEND='fast': expected 'auto', 'xla' or 'native'"):
        has("auto")


def test_one_worker_needs_no_call():
    function = replicated_step(lambda x: sr.all_reduce(x, "data", backend="native"), 1)
    x = normal((1, 10))
    assert not has_call(function, x)
    assert bits(function(x)) == bits(x[0])


def test_a_program_for_several_platforms(monkeypatch):
    mesh = data_mesh(4)
    function = jax.jit(
        jax.shard_map(
            lambda x: sr.all_reduce(x[0], "data", num_skipped=1, backend="auto"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
    )
    monkeypatch.setenv("SKIPREDUCE_BACKEND", "auto")
    x = jax.device_put(normal((4, 10)), NamedSharding(mesh, P("data")))
    # JAX has to be told that a custom call may stand in what is exported.
    allowed = [export.DisabledSafetyCheck.custom_call(TARGET)]
    exported = export.export(function, platforms=("cpu", "cuda", "tpu"), disabled_checks=allowed)(x)
    assert TARGET in exported.mlir_module()
    assert "collective_permute" in exported.mlir_module()
    assert bits(jax.jit(exported.call)(x)) == bits(function(x))


MISSING = """
import jax, jax.numpy as jnp
jax.config.update("jax_num_cpu_devices", 4)
from jax import lax
from jax.sharding import PartitionSpec as P
import jax_skipreduce as sr

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
def some(x):
    reduce = lambda x: sr.all_reduce(x, "data", num_skipped=1, backend="native")
    return lax.cond(lax.axis_index("data") == 2, lambda x: x, reduce, x)

@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
def differing(x):
    return sr.all_reduce(x, "data", shift=lax.axis_index("data"), backend="native")

x = jnp.ones(8)
for function in (some, differing):
    try:
        jax.block_until_ready(function(x))
        print("no error")
    except Exception as error:
        print(str(error).replace("\\n", " "))
fine = jax.jit(jax.shard_map(lambda x: sr.all_reduce(x, "data", backend="native"), mesh=mesh, in_specs=P("data"),
                             out_specs=P()))
print(fine(x))
"""


def test_a_worker_that_does_not_come_is_an_error_and_the_next_call_works():
    environment = os.environ | {"SKIPREDUCE_TIMEOUT": "0.5", "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", MISSING], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stderr
    assert "3 of 4 workers came to an all-reduce and waited 0.5 s for rank 2." in lines[0]
    assert "the shift is 0 on rank 0 and" in lines[1]
    assert lines[2] == "[1. 1.]"


@pytest.mark.parametrize("value", ["0", "soon", "-1", "nan", "inf"])
def test_a_time_limit_that_is_none(monkeypatch, value):
    monkeypatch.setenv("SKIPREDUCE_TIMEOUT", value)
    with pytest.raises(ValueError, match=f"SKIPREDUCE_TIMEOUT='{value}': expected seconds"):
        sr.native_info()


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="backend='gpu': expected 'auto', 'xla'"):
        each_worker("shard_map", lambda x: sr.all_reduce(x, "data", backend="gpu"), 2)(normal((2, 4)))
    with pytest.raises(ValueError, match="backend='gpu'"):
        sr.skipreduce("data", backend="gpu")


@pytest.mark.promotes
def test_a_training_step_around_optax():
    tx = optax.chain(sr.skipreduce("data", 0.5, min_size=1, backend="native"), optax.adam(1e-2))
    params = {"w": jnp.ones((33, 7))}

    @jax.jit
    @functools.partial(jax.shard_map, mesh=data_mesh(8), in_specs=(P(), P(), P("data")), out_specs=(P(), P(), P()))
    def step(params, state, batch):
        loss, grads = sr.local_value_and_grad(lambda p, b: ((b @ p["w"]) ** 2).mean(), "data")(params, batch)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, lax.pmean(loss, "data")

    state, losses = tx.init(params), []
    for _ in range(30):
        params, state, loss = step(params, state, normal((16, 33)))
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
    assert step._cache_size() <= 2  # the second call has replicated arrays
