import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce._topologies.ring import owned_slice
from jax_skipreduce._workers import blocks
from tests.helpers import (
    RUNNERS,
    bits,
    by_reference,
    count_collectives,
    data_mesh,
    each_worker,
    expected_sum,
    normal,
    powers_of_two,
    replicated_step,
    with_runners,
)

DTYPES = ("float32", "float16", "bfloat16", "complex64", "int32", "int8", "uint16")


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16])
def test_contributors_are_those_of_the_paper(num_workers):
    x = powers_of_two(num_workers, num_workers)
    traced = each_worker(
        "vmap", lambda x, k, c: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=None), num_workers
    )
    for num_skipped in range(num_workers):
        static = each_worker(
            "vmap",
            lambda x, c, k=num_skipped: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=None),
            num_workers,
        )
        for shift in {0, 1, num_workers - 1, -1, 3 * num_workers + 2}:
            expected = expected_sum(num_workers, num_skipped, shift)
            for result in (static(x, shift), traced(x, num_skipped, shift)):
                np.testing.assert_array_equal(result, np.tile(expected, (num_workers, 1)))


@pytest.mark.parametrize("num_workers", [3, 7, 8])
def test_a_shift_of_any_size_counts_modulo_n(num_workers):
    x = powers_of_two(num_workers, num_workers)
    traced = each_worker(
        "vmap", lambda x, c: sr.all_reduce(x, "data", num_skipped=1, shift=c, normalize=None), num_workers
    )
    largest = np.iinfo(np.int32).max
    for shift in (
        *(np.int32(largest), np.int32(largest - 1), np.int32(-largest - 1), np.int8(-100), np.uint8(250)),
        *(np.uint32(2**32 - 1), np.uint32(2**31)),
    ):
        expected = expected_sum(num_workers, 1, int(shift) % num_workers)
        np.testing.assert_array_equal(traced(x, jnp.asarray(shift))[0], expected)
    for shift in (2**31, 2**40 + 1, -(2**35)):
        static = each_worker(
            "vmap", lambda x, c=shift: sr.all_reduce(x, "data", num_skipped=1, shift=c, normalize=None), num_workers
        )
        np.testing.assert_array_equal(static(x)[0], expected_sum(num_workers, 1, shift % num_workers))


@pytest.mark.parametrize(("runner", "num_workers"), with_runners([1, 2, 3, 8]))
def test_every_way_to_run_agrees_with_the_reference_to_the_bit(runner, num_workers):
    x = normal((num_workers, 5, 7))
    for num_skipped in {0, num_workers // 2, num_workers - 1}:
        traced_shift = each_worker(
            runner,
            lambda x, c, k=num_skipped: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=None),
            num_workers,
        )
        all_traced = each_worker(
            runner, lambda x, c, k: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=None), num_workers
        )
        for shift in (0, 5):
            expected = by_reference(x, num_skipped, shift)
            assert bits(traced_shift(x, shift)) == bits(expected)
            assert bits(all_traced(x, shift, num_skipped)) == bits(expected)


@pytest.mark.parametrize("shift", [0, -1, 2])
def test_a_static_shift(shift):
    x = normal((8, 30))
    result = each_worker("shard_map", lambda x: sr.all_reduce(x, "data", shift=shift, num_skipped=3), 8)(x)
    assert bits(result) == bits(by_reference(x, 3, shift) / np.float32(8))


@pytest.mark.parametrize(("runner", "dtype"), with_runners(DTYPES))
def test_nothing_skipped_is_pmean(runner, dtype):
    dtype = jnp.dtype(dtype)
    x = normal((8, 3, 11), dtype)
    result = each_worker(runner, lambda x: sr.all_reduce(x, "data"), 8)(x)
    expected = each_worker(runner, lambda x: lax.pmean(x, "data"), 8)(x)
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    if jnp.issubdtype(dtype, jnp.integer):
        assert bits(result) == bits(expected)
    else:
        # Against the mean in float64: no worse than one rounding per addition.
        exact = np.mean(np.asarray(x).astype(np.complex128), axis=0)
        error = np.abs(np.asarray(result).astype(np.complex128) - exact).max()
        assert error <= 8 * float(jnp.finfo(dtype).eps) * np.abs(exact).max()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_skipped_is_psum(dtype):
    dtype = jnp.dtype(dtype)
    x = normal((8, 19), dtype)
    result = replicated_step(lambda x: sr.all_reduce(x, "data", normalize=None), 8)(x)
    assert result.dtype == dtype
    if jnp.issubdtype(dtype, jnp.integer):
        assert bits(result) == bits(replicated_step(lambda x: lax.psum(x, "data"), 8)(x))
    else:
        np.testing.assert_allclose(
            np.asarray(result).astype(np.complex128),
            np.asarray(x).astype(np.complex128).sum(0),
            atol=32 * float(jnp.finfo(dtype).eps),
        )


def test_float64():
    with jax.enable_x64(True):
        x = normal((8, 33), jnp.float64)
        for k in (0, 5):
            result = replicated_step(lambda x, k=k: sr.all_reduce(x, "data", num_skipped=k), 8)(x)
            assert result.dtype == jnp.float64
            assert bits(result) == bits(by_reference(x, k, 0)[0] / 8)
        # Where the default integer has 64 bits, a traced k and the loop still agree on int32.
        loop = replicated_step(lambda x, k, c: sr.all_reduce(x, "data", num_skipped=k, shift=c), 8)
        assert bits(loop(x, 5, 0)) == bits(result)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_are_added_in_float32_and_sent_in_their_own_dtype(dtype):
    dtype = jnp.dtype(dtype)
    x = normal((8, 64), dtype)
    function = replicated_step(lambda x: sr.all_reduce(x, "data", num_skipped=2, normalize=None), 8)
    assert bits(function(x)) == bits(by_reference(x, 2, 0, accumulator=np.float32)[0])
    text = function.lower(x).compile().as_text()
    permutes = [line for line in text.splitlines() if " collective-permute" in line and "u16[8]" in line]
    assert len(permutes) >= 5
    assert "f32[8]{0} collective-permute" not in text
    # The mean is divided in float32 too: rounded once, from the sum of all.
    mean = replicated_step(lambda x: sr.all_reduce(x, "data", normalize="drop", num_skipped=7), 8)(x)
    assert bits(mean) == bits(by_reference(x, 7, 0)[0])


@pytest.mark.parametrize(("num_workers", "num_skipped", "shift"), [(3, 0, -1), (4, 2, 1), (8, 5, 6), (20, 3, 7)])
@pytest.mark.parametrize("wire_dtype", [None, "bfloat16"])
def test_an_array_of_megabytes(num_workers, num_skipped, shift, wire_dtype):
    x = normal((num_workers, 2**18 + 5))
    assert x[0].nbytes > blocks._MIN_BYTES_LARGE

    def reduce(x, shift):
        return sr.all_reduce(x, "data", num_skipped=num_skipped, shift=shift, normalize=None, wire_dtype=wire_dtype)

    result = each_worker("vmap", reduce, num_workers)(x, shift)
    expected = by_reference(x, num_skipped, shift, wire_dtype=wire_dtype)
    assert bits(result) == bits(expected)
    static = each_worker("vmap", lambda x: reduce(x, shift), num_workers)(x)
    assert bits(static) == bits(expected)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7,), (8,), (9,), (2, 3, 5), (1000,)])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_any_shape(shape, num_workers):
    x = normal((num_workers, *shape))
    for k in {0, num_workers - 1}:
        result = replicated_step(lambda x, k=k: sr.all_reduce(x, "data", num_skipped=k, normalize=None), num_workers)(x)
        assert result.shape == shape
        if result.size:
            assert bits(result) == bits(by_reference(x.reshape(num_workers, -1), k, 0)[0])


def test_an_empty_integer_is_normalized_like_any_other():
    result = replicated_step(lambda x: sr.all_reduce(x, "data"), 8)(jnp.zeros((8, 0), jnp.int32))
    assert result.dtype == jnp.float32


@pytest.mark.parametrize("check_vma", [True, False])
def test_result_is_the_same_on_all_workers_and_in_every_run(check_vma):
    x = normal((8, 1000))
    everywhere = each_worker(
        "shard_map" if check_vma else "shard_map_unchecked",
        lambda x, c: sr.all_reduce(x, "data", num_skipped=4, shift=c),
        8,
    )
    first = everywhere(x, 3)
    assert len({bits(row) for row in first}) == 1
    assert {bits(everywhere(x, 3)) for _ in range(20)} == {bits(first)}


def test_result_leaves_shard_map_as_replicated():
    seen = []

    def step(x):
        result = sr.all_reduce(x, "data", num_skipped=4)
        seen.append(jax.typeof(result).mat.varying)
        return result

    replicated_step(step, 8)(normal((8, 10)))
    assert seen == [frozenset()]


def test_a_value_that_all_workers_share_counts_n_times_as_in_psum():
    run = jax.jit(
        jax.shard_map(
            lambda x: (sr.all_reduce(x, "data", normalize=None), lax.psum(x, "data")),
            mesh=data_mesh(8),
            in_specs=P(),
            out_specs=P(),
        )
    )
    ours, theirs = run(jnp.arange(10.0))
    assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("normalize", ["skip", "drop", None])
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_normalize(normalize, dtype):
    x = powers_of_two(8, 16, dtype)
    for k in (0, 3, 7):
        total = expected_sum(8, k, 2, 2)
        divisor = {"skip": 8, "drop": 8 - k, None: 1}[normalize]
        static = replicated_step(
            lambda x, c, k=k: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=normalize), 8
        )(x, 2)
        traced = replicated_step(
            lambda x, c, k: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=normalize), 8
        )(x, 2, k)
        for result in (static, traced):
            if divisor in (1, 8):
                np.testing.assert_array_equal(result, total / np.float32(divisor))
            else:  # XLA multiplies by the reciprocal of a divisor, here as in pmean: one ulp
                np.testing.assert_array_max_ulp(np.asarray(result), total / np.float32(divisor), maxulp=1)


def test_small_integers_cannot_count_many_workers():
    x = jnp.zeros((300, 4), jnp.int8).at[7].set(60)
    for normalize in ("skip", "drop"):
        mean = each_worker("vmap", lambda x, n=normalize: sr.all_reduce(x, "data", normalize=n), 300)(x)
        np.testing.assert_allclose(mean[0], 60 / 300, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["complex64", "float16", "int32"])
def test_drop_divides_every_dtype(dtype):
    x = powers_of_two(8, 16, dtype)
    traced = each_worker("vmap", lambda x, k: sr.all_reduce(x, "data", num_skipped=k, normalize="drop"), 8)
    np.testing.assert_allclose(traced(x, 4)[0], (expected_sum(8, 4, 0, 2) / 4).astype(traced(x, 4).dtype), rtol=1e-3)


def test_drop_is_unbiased_over_the_shifts():
    x = normal((8, 24), jnp.int32).astype(jnp.float32)
    sums, drops = (
        replicated_step(lambda x, k, c, n=n: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=n), 8)
        for n in (None, "drop")
    )
    for k in range(8):
        # Small integers, so sums are exact: over all shifts each worker is in each slice N-k times.
        np.testing.assert_array_equal(sum(sums(x, k, c) for c in range(8)), (8 - k) * jnp.sum(x, axis=0))
        mean = sum(np.float64(drops(x, k, c)) for c in range(8)) / 8
        np.testing.assert_allclose(mean, np.mean(x, axis=0), rtol=0, atol=1e-6 * np.abs(x).max())


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_steps_on_the_wire(num_workers):
    x = normal((num_workers, 10 * num_workers))
    for k in range(num_workers):
        function = replicated_step(lambda x, c, k=k: sr.all_reduce(x, "data", num_skipped=k, shift=c), num_workers)
        counts = count_collectives(function, x, 0)
        # The one all-gather is N-1 steps of the ring.
        expected = {"all-gather": 1, "collective-permute": num_workers - 1 - k}
        assert counts == {name: count for name, count in expected.items() if count}


def test_alone_nothing_is_sent():
    counts = count_collectives(replicated_step(lambda x: sr.all_reduce(x, "data"), 1), normal((1, 10)))
    assert counts.get("collective-permute", 0) == 0
    counts = count_collectives(replicated_step(lambda x: sr.all_reduce(x, "data"), 1, check_vma=False), normal((1, 10)))
    assert counts == {}


def test_a_scatter_loop_runs_as_many_steps_as_are_not_skipped():
    function = replicated_step(lambda x, k: sr.all_reduce(x, "data", num_skipped=k), 8)
    counts = count_collectives(function, normal((8, 80)), 3)
    assert counts == {"collective-permute": 1, "all-gather": 1}


@pytest.mark.parametrize("num_skipped", [0, 20, "traced"])
def test_size_of_the_program_does_not_grow_with_the_workers(num_skipped):
    def num_equations(num_workers):
        def function(x, k):
            k = k if num_skipped == "traced" else num_skipped
            return sr.all_reduce(x, "data", num_skipped=k, shift=k if num_skipped == "traced" else 0)

        jaxpr = jax.make_jaxpr(function, axis_env=[("data", num_workers)])(jnp.zeros(4096), 3)
        return sum(1 for line in str(jaxpr).splitlines() if " = " in line)

    assert num_equations(64) == num_equations(256)


@pytest.mark.parametrize("num_workers", [20, 24])
def test_loop_for_many_workers(num_workers):
    # More steps than are written out one by one, with a k that is known.
    x = powers_of_two(num_workers, num_workers)
    for k in (0, 2, num_workers - 1):
        result = each_worker(
            "vmap", lambda x, k=k: sr.all_reduce(x, "data", num_skipped=k, shift=1, normalize=None), num_workers
        )(x)
        np.testing.assert_array_equal(result[0], expected_sum(num_workers, k, 1))


@pytest.mark.parametrize("runner", RUNNERS)
def test_skipped_gather_steps(runner):
    x = normal((8, 26))
    for skipped in (1, 3, 7):
        result = each_worker(
            runner,
            lambda x, g=skipped: sr.all_reduce(x, "data", num_skipped=2, normalize=None, num_gather_skipped=g),
            8,
        )(x)
        full = by_reference(x, 2, 0)[0]
        for rank in range(8):
            expected = np.zeros((8, 4), np.float32)
            have = [owned_slice(rank - i, 0, 8) for i in range(8 - skipped)]
            expected[have] = np.pad(full, (0, 6)).reshape(8, 4)[have]
            assert bits(result[rank]) == bits(expected.reshape(-1)[:26])


def test_skipped_gather_steps_are_typed_as_differing_between_workers():
    with pytest.raises(ValueError, match="out_specs"):
        replicated_step(lambda x: sr.all_reduce(x, "data", num_gather_skipped=1), 8)(normal((8, 8)))
    counts = count_collectives(
        each_worker("shard_map", lambda x: sr.all_reduce(x, "data", num_skipped=3, num_gather_skipped=2), 8),
        normal((8, 8)),
    )
    assert counts == {"collective-permute": 4 + 5}


@pytest.mark.parametrize("runner", RUNNERS)
def test_dropout_adds_whole_contributions_or_none(runner):
    num_workers, num_elements = 8, 4096
    x = powers_of_two(num_workers, num_elements)
    dropout = each_worker(
        runner,
        lambda x, key, k: sr.all_reduce(x, "data", num_skipped=k, mode="dropout", key=key, normalize=None),
        num_workers,
    )
    result = np.asarray(dropout(x, jax.random.key(3), 4))
    assert len({bits(row) for row in result}) == 1
    included = (result[0].astype(np.int64)[:, None] >> np.arange(num_workers)) & 1
    # Algorithm 1: the first sender of slice j, which is worker j, always contributes.
    first = np.repeat(np.arange(num_workers), num_elements // num_workers)
    assert included[np.arange(num_elements), first].all()
    others = (included.sum() - num_elements) / ((num_workers - 1) * num_elements)
    assert abs(others - 0.5) < 5 * np.sqrt(0.25 / ((num_workers - 1) * num_elements))
    # Nothing skipped: the plain sum. Another key: other elements.
    np.testing.assert_array_equal(dropout(x, jax.random.key(3), 0)[0], 2**num_workers - 1)
    assert bits(dropout(x, jax.random.key(4), 4)) != bits(result)


def test_dropout_divides_by_the_number_of_contributors():
    x = powers_of_two(8, 512)
    key = jax.random.key(0)
    run = {
        normalize: replicated_step(
            lambda x, key, n=normalize: sr.all_reduce(x, "data", num_skipped=6, mode="dropout", key=key, normalize=n), 8
        )(x, key)
        for normalize in ("skip", "drop", None)
    }
    total = np.asarray(run[None])
    count = ((total.astype(np.int64)[:, None] >> np.arange(8)) & 1).sum(1)
    np.testing.assert_array_equal(run["skip"], total / 8)
    np.testing.assert_array_equal(run["drop"], total / count.astype(np.float32))


@pytest.mark.parametrize(("runner", "num_workers"), with_runners([1, 2, 5, 8]))
def test_reduce_scatter_then_all_gather_is_all_reduce(runner, num_workers):
    x = normal((num_workers, 3, 7))
    k = num_workers // 2

    def both(x, c):
        part = sr.reduce_scatter(x, "data", num_skipped=k, shift=c)
        whole = sr.all_gather(part, "data", shift=c, shape=x.shape)
        return part, whole, sr.all_reduce(x, "data", num_skipped=k, shift=c)

    for shift in (0, 3):
        part, whole, expected = each_worker(runner, both, num_workers)(x, shift)
        width = -(-21 // num_workers)
        assert part.shape == (num_workers, width)
        assert bits(whole) == bits(expected)
        padded = np.pad(np.asarray(expected[0]).reshape(-1), (0, num_workers * width - 21)).reshape(num_workers, width)
        for rank in range(num_workers):
            assert bits(part[rank]) == bits(padded[owned_slice(rank, shift, num_workers)])


def test_reduce_scatter_in_the_layout_of_psum_scatter():
    x = normal((8, 32), jnp.int32)
    ours = each_worker("vmap", lambda x: sr.reduce_scatter(x, "data", shift=-1, normalize=None), 8)(x)
    theirs = each_worker("vmap", lambda x: lax.psum_scatter(x, "data", tiled=True), 8)(x)
    np.testing.assert_array_equal(ours, theirs)
    mean = each_worker("vmap", lambda x: sr.reduce_scatter(x, "data", shift=-1), 8)(x)
    np.testing.assert_array_equal(mean, np.asarray(theirs) / np.float32(8))


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a"), ("c", "a"), ("a", "c", "b")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_tuples_of_axes_in_any_order(names, check_vma):
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    num_workers = 2 ** len(names)
    ordered = tuple(sorted(names))  # as in the mesh
    x = powers_of_two(num_workers, 3 * num_workers)

    def local(x):
        return sr.all_reduce(x[0], names, num_skipped=1, shift=1, normalize=None)

    result = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(ordered), out_specs=P(), check_vma=check_vma))(x)
    np.testing.assert_array_equal(result, expected_sum(num_workers, 1, 1, 3))


def test_derivative_is_that_of_pmean():
    for dtype in (jnp.float32, jnp.bfloat16):
        x = normal((8, 24), dtype)

        def loss(x, reduce):
            return replicated_step(lambda x: jnp.sum(reduce(x).astype(jnp.float32) ** 2), 8)(x)

        ours = jax.grad(lambda x: loss(x, lambda x: sr.all_reduce(x, "data")))(x)
        theirs = jax.grad(lambda x: loss(x, lambda x: lax.pmean(x, "data")))(x)
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs.astype(jnp.float32), atol=4 * float(jnp.finfo(dtype).eps), rtol=0
        )


@pytest.mark.parametrize("num_workers", [8, 20])
def test_derivative_where_steps_become_a_loop(num_workers):
    x = normal((num_workers, 40))

    @jax.jit
    def loss(x):
        reduced = jax.vmap(lambda x: sr.all_reduce(x, "data", num_skipped=1), axis_name="data")(x)
        return jnp.sum(reduced[0] ** 2)

    direction = normal(x.shape, seed=1)
    along = (loss(x + 1e-2 * direction) - loss(x - 1e-2 * direction)) / 2e-2
    np.testing.assert_allclose(jnp.vdot(jax.grad(loss)(x), direction), along, rtol=1e-2)


def test_a_batch_of_shifts_and_of_ks():
    x = powers_of_two(8, 8)
    shifts, steps = jnp.arange(4), jnp.asarray([0, 3, 7, 1])

    def local(x):
        reduce = lambda k, c: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=None)  # noqa: E731
        return jax.vmap(reduce)(steps, shifts)

    for runner in ("vmap", "shard_map"):
        got = each_worker(runner, local, 8)(x)[0]
        for row, k, c in zip(got, steps, shifts, strict=True):
            np.testing.assert_array_equal(row, expected_sum(8, int(k), int(c)))
