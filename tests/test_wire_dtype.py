"""Wider floats sent as narrower ones: what is rounded, what is not, and what is on the wire."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_skipreduce as sr
from tests.helpers import (
    bits,
    by_reference,
    collectives,
    data_mesh,
    each_worker,
    expected_sum,
    normal,
    powers_of_two,
    replicated_step,
    update,
    with_runners,
)

WIRES = ("bfloat16", "float16")


@pytest.mark.parametrize("wire_dtype", WIRES)
@pytest.mark.parametrize(("runner", "num_workers"), with_runners([2, 3, 8]))
def test_each_step_rounds_once_and_adds_in_float32(num_workers, runner, wire_dtype):
    x = normal((num_workers, 3 * num_workers))
    for k, shift in {(0, 0), (1, 2), (num_workers - 1, -1)}:
        run = each_worker(
            runner,
            lambda x, k=k, c=shift: sr.all_reduce(
                x, "data", num_skipped=k, shift=c, normalize=None, wire_dtype=wire_dtype
            ),
            num_workers,
        )
        assert bits(run(x)) == bits(by_reference(x, k, shift, wire_dtype=wire_dtype))


@pytest.mark.parametrize("num_workers", [2, 8, 20])
def test_a_traced_k_and_shift_give_the_same_bits(num_workers):
    x = normal((num_workers, 2 * num_workers))
    run = each_worker(
        "vmap",
        lambda x, k, c: sr.all_reduce(x, "data", num_skipped=k, shift=c, normalize=None, wire_dtype="bfloat16"),
        num_workers,
    )
    for k, shift in ((0, 0), (1, 5), (num_workers - 1, 1)):
        assert bits(run(x, k, shift)) == bits(by_reference(x, k, shift, wire_dtype="bfloat16"))


def test_contributors_are_those_of_the_paper():
    # Sums of up to eight powers of two fit in the eight bits of bfloat16.
    x = powers_of_two(8, 8)
    for k in range(8):
        run = each_worker(
            "vmap",
            lambda x, k=k: sr.all_reduce(x, "data", num_skipped=k, shift=3, normalize=None, wire_dtype="bfloat16"),
            8,
        )
        np.testing.assert_array_equal(run(x), np.tile(expected_sum(8, k, 3), (8, 1)))


@pytest.mark.parametrize("num_gather_skipped", [1, 6])
def test_a_gather_that_is_cut_short_rounds_what_it_sends(num_gather_skipped):
    x = normal((8, 24))
    run = each_worker(
        "shard_map",
        lambda x: sr.all_reduce(
            x, "data", num_skipped=2, num_gather_skipped=num_gather_skipped, normalize=None, wire_dtype="bfloat16"
        ),
        8,
    )
    expected = np.asarray(by_reference(x, 2, 0, num_gather_skipped, wire_dtype="bfloat16")).reshape(8, 8, 3)
    got = np.asarray(run(x)).reshape(8, 8, 3)
    for rank in range(8):
        for distance in range(8 - num_gather_skipped):  # the others are zero, and not so in the schedule
            index = (rank - distance + 1) % 8
            np.testing.assert_array_equal(got[rank, index], expected[rank, index])


def test_half_the_bytes_are_on_the_wire():
    run = replicated_step(lambda x: sr.all_reduce(x, "data", num_skipped=4, wire_dtype="bfloat16"), 8)
    sent = collectives(run.lower(normal((8, 800))).compile().as_text())
    assert sorted(sent) == sorted([("u16[8,100]{1,0}", "all-gather"), *[("u16[100]{0}", "collective-permute")] * 3])


def test_all_workers_hold_the_same_and_it_is_what_the_wire_can_carry():
    run = each_worker("shard_map", lambda x: sr.all_reduce(x, "data", num_skipped=3, wire_dtype="bfloat16"), 8)
    rows = run(normal((8, 1001)))
    assert rows.dtype == jnp.float32
    assert len({bits(row) for row in rows}) == 1
    assert bits(rows) == bits(rows.astype(jnp.bfloat16).astype(jnp.float32))


def test_reduce_scatter_does_not_round_its_result():
    x = normal((8, 64))
    run = each_worker(
        "shard_map", lambda x: sr.reduce_scatter(x, "data", num_skipped=6, normalize=None, wire_dtype="bfloat16"), 8
    )
    # One step: what arrives is rounded, the own contribution is not.
    arrived = np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32)).reshape(8, 8, 8)
    own = np.asarray(x).reshape(8, 8, 8)
    for rank, result in enumerate(run(x)):
        index = (rank + 1) % 8
        np.testing.assert_array_equal(result, arrived[(rank - 1) % 8, index] + own[rank, index])


def test_all_gather_rounds_the_own_slice_too():
    x = normal((4, 6))
    got = each_worker("shard_map", lambda x: sr.all_gather(x, "data", shift=-1, wire_dtype="bfloat16"), 4)(x)
    rounded = np.asarray(x.astype(jnp.bfloat16).astype(jnp.float32)).reshape(-1)
    np.testing.assert_array_equal(got, np.tile(rounded, (4, 1)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_worker_rounds_nothing(check_vma):
    x = normal((1, 10))
    run = replicated_step(lambda x: sr.all_reduce(x, "data", wire_dtype="bfloat16"), 1, check_vma)
    assert bits(run(x)) == bits(x)


@pytest.mark.parametrize("dtype", ["int32", "uint16", "bfloat16", "float16", "complex64"])
def test_what_is_no_wider_float_is_sent_as_it_is(dtype):
    x = normal((8, 24), jnp.dtype(dtype))

    def run(wire_dtype):
        return each_worker("shard_map", lambda x: sr.all_reduce(x, "data", num_skipped=2, wire_dtype=wire_dtype), 8)(x)

    assert bits(run("bfloat16")) == bits(run(None))


def test_float64_can_travel_as_float32():
    with jax.enable_x64():
        x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 24)))
        assert x.dtype == jnp.float64
        run = replicated_step(
            lambda x: sr.all_reduce(x, "data", num_skipped=2, normalize=None, wire_dtype="float32"), 8
        )
        assert bits(run(x)) == bits(by_reference(x, 2, 0, wire_dtype="float32")[0])


def test_a_derivative_goes_the_same_way():
    x = normal((8, 24))

    def loss(x):
        mean = each_worker("shard_map", lambda x: sr.all_reduce(x, "data", wire_dtype="bfloat16"), 8)(x)[0]
        return jnp.sum(mean**2)

    mean = np.mean(np.asarray(x), 0)
    np.testing.assert_allclose(jax.grad(loss)(x), np.tile(2 * mean / 8, (8, 1)), atol=0.02)


class TestTransformation:
    def grads(self, num_workers=8):
        return {"w": normal((num_workers, 40, 30)), "b": normal((num_workers, 40), seed=1)}

    @pytest.mark.parametrize("check_vma", [True, False])
    def test_skipped_leaves_are_rounded_and_no_others(self, check_vma):
        grads = {**self.grads(), "head": normal((8, 2000), seed=2), "half": normal((8, 1100), jnp.bfloat16, seed=3)}
        settings = {"protect": sr.by_path("head"), "mode": "static"}
        plain = sr.skipreduce("data", 0.5, **settings)
        narrow = sr.skipreduce("data", 0.5, wire_dtype=jnp.bfloat16, **settings)
        expected = replicated_step(update(plain), 8, check_vma)(grads)
        got = replicated_step(update(narrow), 8, check_vma)(grads)
        for name in ("b", "head", "half"):
            assert bits(got[name]) == bits(expected[name]), name
        assert got["w"].dtype == jnp.float32
        assert bits(got["w"]) != bits(expected["w"])
        assert bits(got["w"]) == bits(got["w"].astype(jnp.bfloat16).astype(jnp.float32))
        np.testing.assert_allclose(got["w"], expected["w"], atol=0.01)

    def test_a_schedule_and_every_mode(self):
        grads = self.grads()
        for mode in ("random", "dropout"):
            traced = sr.skipreduce(
                "data", lambda count: jnp.where(count >= 0, 0.5, 0.0), mode=mode, wire_dtype="bfloat16"
            )
            static = sr.skipreduce("data", 0.5, mode=mode, wire_dtype="bfloat16")
            got, expected = (replicated_step(update(tx, 7), 8)(grads) for tx in (traced, static))
            assert bits(got["w"]) == bits(expected["w"]), mode

    def test_bytes_of_the_description_are_those_of_the_program(self):
        grads = self.grads()
        method = sr.SkipReduce("data", 0.5, wire_dtype="bfloat16")
        tx = method.transform()
        description = sr.describe(jax.tree.map(lambda x: x[0], grads), 8, method)
        leaf = next(leaf for leaf in description.leaves if leaf.path == "w")
        assert (leaf.dtype, leaf.wire_dtype, leaf.wire_bytes) == ("float32", "bfloat16", (14 - 4) * 150 * 2)
        assert leaf.full_wire_bytes == 14 * 150 * 4
        text = replicated_step(update(tx), 8).lower(grads).compile().as_text()
        sent = [shape for shape, operation in collectives(text) if operation == "collective-permute"]
        assert len(sent) == 3
        assert all(shape.startswith("u16[150]") for shape in sent)
        assert "float32  bfloat16  skipped" in str(description)

    def test_under_pjit(self):
        mesh = data_mesh(8)
        params = jax.tree.map(lambda x: x[0], self.grads())
        inside = sr.skipreduce("data", 0.5, wire_dtype="bfloat16")
        outside = sr.skipreduce("data", 0.5, wire_dtype="bfloat16", mesh=mesh)
        got = jax.jit(lambda g: outside.update(g, outside.init(params), params)[0])(self.grads())
        expected = replicated_step(update(inside), 8)(self.grads())
        assert bits(got["w"]) == bits(expected["w"])


@pytest.mark.parametrize(
    ("wire_dtype", "error"), [("int8", ValueError), ("float64", ValueError), ("half-ish", TypeError), (1.5, TypeError)]
)
def test_a_dtype_that_cannot_be_sent(wire_dtype, error):
    with pytest.raises(error, match=r"wire_dtype=.*expected one of bfloat16, float16, float32"):
        sr.skipreduce("data", wire_dtype=wire_dtype)
    for function in (sr.all_reduce, sr.reduce_scatter, sr.all_gather):
        with pytest.raises(error, match=r"wire_dtype=.*expected one of bfloat16, float16, float32"):
            jax.vmap(lambda x, f=function: f(x, "data", wire_dtype=wire_dtype), axis_name="data")(jnp.zeros((2, 4)))
