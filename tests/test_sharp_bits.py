"""Each section of docs/sharp-bits.md: what goes wrong, and the right way."""

import functools
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jax_skipreduce as sr
from jax_skipreduce.programs.netlab._plan import make_plan
from jax_skipreduce.programs.netlab._worker import environment
from tests.helpers import bits, collectives, data_mesh, each_worker, normal, powers_of_two

pytestmark = pytest.mark.promotes  # optax's wrappers do

GRADS = {"w": normal((8, 64)), "v": normal((8, 40), seed=1)}
LOCAL = {"w": jnp.ones(64), "v": jnp.ones(40)}


def skip(ratio=0.5, **settings):
    return sr.skipreduce("data", ratio, min_size=0, **settings)


def updates(tx, check_vma, grads=GRADS, num_steps=1):
    """What the last of `num_steps` updates gave each worker, by rank."""

    def local(grads):
        state = tx.init(LOCAL)
        for _ in range(num_steps):
            result, state = tx.update(grads, state, LOCAL)
        return result

    return each_worker("shard_map" if check_vma else "shard_map_unchecked", local, 8)(grads)


def num_replicas(result):
    return len({tuple(bits(leaf[rank]) for leaf in jax.tree.leaves(result)) for rank in range(8)})


def replicated(tx, grads=GRADS):
    """An update whose result leaves shard_map as P(), under check_vma=True."""
    step = jax.shard_map(
        lambda g: tx.update(jax.tree.map(lambda x: x[0], g), tx.init(LOCAL), LOCAL)[0],
        mesh=data_mesh(8),
        in_specs=P("data"),
        out_specs=P(),
    )
    return jax.jit(step)(grads)


def test_every_section_has_a_test():
    page = (Path(__file__).parent.parent / "docs" / "sharp-bits.md").read_text()
    sections = dict(section.split("\n", 1) for section in page.split("\n## ")[1:])
    del sections["Also"]
    named = {title: set(re.findall(r"`(test_\w+)`", text)) for title, text in sections.items()}
    assert [title for title, tests in named.items() if not tests] == []
    here = {name for name in globals() if name.startswith("test_")} - {"test_every_section_has_a_test"}
    assert set().union(*named.values()) == here


def test_multi_steps_around():
    wrong = optax.MultiSteps(optax.chain(skip(), optax.sgd(1.0)), 2)
    wrong = optax.GradientTransformation(wrong.init, wrong.update)
    # With tracking, the accumulator is noticed: it is typed as the same on all workers, gradients are not.
    # (Older versions of optax fail first, at a branch whose results differ in type.)
    with pytest.raises((ValueError, TypeError), match=r"a wrapper around skipreduce|branches must have equal output"):
        replicated(wrong)
    # Without, each of two micro-steps runs a ring, although only the second one's result is used.
    local = each_worker("shard_map_unchecked", lambda g: wrong.update(g, wrong.init(LOCAL), LOCAL)[0], 8)
    assert any(kind == "collective-permute" for _, kind in collectives(local.lower(GRADS).compile().as_text()))

    right = optax.chain(skip(), optax.MultiSteps(optax.sgd(1.0), 2))
    assert num_replicas(updates(right, check_vma=False, num_steps=2)) == 1
    replicated(right)


def test_accumulate_first():
    """The code of the page: local gradients of several micro-batches, one reduction."""
    tx = optax.chain(skip(0.0), optax.sgd(1.0))
    params, batches = jnp.ones(5), normal((8, 4, 6, 5))

    def loss_fn(params, batch):
        return jnp.mean((batch @ params - 1.0) ** 2)

    def step(micro_batches, params):
        local = sr.local_params(params, "data")

        def accumulate(total, micro_batch):
            loss, grads = jax.value_and_grad(loss_fn)(local, micro_batch)
            return jax.tree.map(jnp.add, total, grads), loss

        total, losses = lax.scan(accumulate, jax.tree.map(jnp.zeros_like, local), micro_batches)
        grads = jax.tree.map(lambda g: g / len(losses), total)
        return tx.update(grads, tx.init(params))[0]

    run = each_worker("shard_map", step, 8)
    np.testing.assert_allclose(
        run(batches, params)[0], -jax.grad(loss_fn)(params, batches.reshape(-1, 5)), rtol=1e-4, atol=1e-5
    )
    kinds = [kind for _, kind in collectives(run.lower(batches, params).compile().as_text())]
    assert sorted(kinds) == ["all-gather", *["collective-permute"] * 7]


def test_optimizer_before():
    wrong = optax.chain(optax.adam(1.0), skip(0.0))
    # A mean of signs, not the sign of a mean.
    first = updates(wrong, check_vma=False)["w"][0]
    assert np.abs(np.abs(first) - 1).max() > 0.5
    states = jax.shard_map(
        lambda g: wrong.update(jax.tree.map(lambda x: x[0], g), wrong.init(LOCAL))[1],
        mesh=data_mesh(8),
        in_specs=P("data"),
        out_specs=P(),
    )
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(states, GRADS)
    right = updates(optax.chain(skip(0.0), optax.adam(1.0)), check_vma=True)["w"][0]
    np.testing.assert_allclose(np.abs(right), 1, rtol=1e-3)


def test_apply_if_finite_around():
    wrong = optax.apply_if_finite(optax.chain(skip(), optax.sgd(1.0)), 3)
    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        replicated(wrong)

    right = optax.chain(skip(), optax.apply_if_finite(optax.sgd(1.0), 3))
    grads = {**GRADS, "w": GRADS["w"].at[3].set(jnp.nan)}
    for check_vma in (True, False):
        result = updates(right, check_vma, grads)
        assert num_replicas(result) == 1
        np.testing.assert_array_equal(result["v"], 0)  # all workers leave out the step


def test_masked_around():
    wrong = optax.masked(skip(), {"w": True, "v": False})
    assert num_replicas(updates(wrong, check_vma=False)) == 8
    with pytest.raises(ValueError, match="out_specs"):
        replicated(wrong)

    right = skip(protect={"w": False, "v": True})
    for check_vma in (True, False):
        result = updates(right, check_vma)
        assert num_replicas(result) == 1
        np.testing.assert_allclose(result["v"][0], GRADS["v"].mean(0), atol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_freezing(check_vma):
    """The code of the page: fresh zeros for frozen gradients, of which nothing is sent."""
    params = {"w": jnp.ones(64), "v": jnp.ones(1001)}  # as 8 workers cut them: slices of 8 and of 126 elements
    mask = {"w": False, "v": True}
    labels = jax.tree.map(lambda frozen: "frozen" if frozen else "train", mask)
    train = optax.chain(skip(backend="xla"), optax.adam(1e-2))
    tx = optax.partition({"train": train, "frozen": optax.set_to_zero()}, labels)
    batch = {"w": normal((8, 64)), "v": normal((8, 1001))}

    def loss_fn(params, batch):
        return sum(jnp.vdot(params[name], batch[name][0]) for name in params)

    def make_step(tx, with_zeros):
        def step(params, state, batch):
            _, grads = sr.local_value_and_grad(loss_fn, "data")(params, batch)
            if with_zeros:
                grads = jax.tree.map(lambda frozen, g: jnp.zeros(g.shape, g.dtype) if frozen else g, mask, grads)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
        return jax.jit(jax.shard_map(step, mesh=data_mesh(8), check_vma=check_vma, **specs))

    if check_vma:
        for wrong in (tx, optax.selective_transform(train, freeze_mask=mask)):
            with pytest.raises(ValueError, match="out_specs"):
                make_step(wrong, with_zeros=False).lower(params, wrong.init(params), batch)
    run, state = make_step(tx, with_zeros=True), tx.init(params)
    new, _ = run(params, state, batch)
    np.testing.assert_array_equal(new["v"], params["v"])
    assert (new["w"] != params["w"]).all()
    sent = collectives(run.lower(params, state, batch).compile().as_text())
    assert sorted(kind for _, kind in sent) == ["all-gather", *["collective-permute"] * 3]
    sizes = {int(size) for shape, _ in sent for size in re.findall(r"\d+", shape.split("[")[1].split("]")[0])}
    assert sizes <= {1, 8, 64}  # of slices of w

    # Or the trainable part alone.
    def of_train(trained, state, batch):
        loss = lambda trained, batch: loss_fn({"v": params["v"], **trained}, batch)  # noqa: E731
        _, grads = sr.local_value_and_grad(loss, "data")(trained, batch)
        return train.update(grads, state, trained)[0]

    mapped = jax.shard_map(
        of_train, mesh=data_mesh(8), in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    updates = jax.jit(mapped)({"w": params["w"]}, train.init({"w": params["w"]}), batch)
    np.testing.assert_allclose(params["w"] + updates["w"], new["w"], rtol=1e-6)


def test_collective_in_the_loss():
    x = normal((8, 4, 5))
    params = jnp.ones(5)

    def gradient(loss, check_vma):
        local = lambda x, p: skip(0.0).update(  # noqa: E731
            sr.local_value_and_grad(loss, "data")(p, x)[1], sr.SkipReduceState(jnp.int32(0))
        )[0]
        return each_worker("shard_map" if check_vma else "shard_map_unchecked", local, 8)(x, params)[0]

    def local_loss(p, x):
        return jnp.mean((x @ p - 1.0) ** 2)

    expected = jax.grad(lambda p: jnp.mean(jnp.stack([local_loss(p, row) for row in x])))(params)
    np.testing.assert_allclose(gradient(local_loss, True), expected, rtol=1e-4)
    np.testing.assert_allclose(gradient(local_loss, False), expected, rtol=1e-4)

    def summed_loss(p, x):
        return lax.psum(local_loss(p, x), "data")

    with pytest.raises(ValueError, match="the loss is the same on all workers"):
        gradient(summed_loss, True)
    # Nothing tells without tracking: the gradient is N times too large.
    np.testing.assert_allclose(gradient(summed_loss, False), 8 * expected, rtol=1e-4)


def test_pcast_inside_the_loss():
    def step(params, x):
        def loss(p, x):
            return jnp.sum(x @ lax.pcast(p, "data", to="varying"))

        return skip().update(jax.grad(loss)(params, x[0]), sr.SkipReduceState(jnp.int32(0)))[0]

    with pytest.raises(ValueError, match="is already the same on all workers of 'data'"):
        jax.shard_map(step, mesh=data_mesh(8), in_specs=(P(), P("data")), out_specs=P())(jnp.ones(5), normal((8, 4, 5)))


def test_clipping_before_the_reduction():
    large = {**GRADS, "w": GRADS["w"].at[0].multiply(100)}  # one worker with a large gradient
    mean = jax.tree.map(lambda x: x.mean(0), large)
    expected = optax.clip_by_global_norm(1.0).update(mean, optax.EmptyState())[0]
    right = updates(optax.chain(skip(0.0), optax.clip_by_global_norm(1.0)), True, large)
    np.testing.assert_allclose(right["w"][0], expected["w"], atol=1e-5)
    # Each worker by its own norm: another direction.
    wrong = updates(optax.chain(optax.clip_by_global_norm(1.0), skip(0.0)), False, large)
    cosine = jnp.vdot(wrong["w"][0], expected["w"]) / jnp.linalg.norm(wrong["w"][0]) / jnp.linalg.norm(expected["w"])
    assert cosine < 0.9


def test_scale_of_sgd():
    ones = jax.tree.map(jnp.ones_like, GRADS)
    for ratio in (0.25, 0.5, 0.75):
        np.testing.assert_allclose(updates(skip(ratio), True, ones)["w"], 1 - ratio)
        np.testing.assert_allclose(updates(skip(ratio, normalize="drop"), True, ones)["w"], 1.0)
        # Adam divides by the size of the gradient, so it does not see the factor.
        adam = optax.chain(skip(ratio), optax.adam(1.0))
        np.testing.assert_allclose(updates(adam, True, ones)["w"], -1.0, rtol=1e-5)


def test_a_ratio_that_changes_and_adam():
    def last_update(normalize):
        tx = optax.chain(skip(lambda count: jnp.where(count < 50, 0.0, 0.5), normalize=normalize), optax.adam(1.0))

        def local(grads):
            _, results = lax.scan(lambda state, _: tx.update(grads, state)[::-1], tx.init(grads), None, 100)
            return results["w"][-1]

        return each_worker("vmap", local, 8)(jax.tree.map(jnp.ones_like, GRADS))

    np.testing.assert_allclose(last_update("drop"), -1.0, rtol=1e-5)
    # The mean of the gradients has followed, that of their squares has not.
    mean = square = 0.0
    for size in [1.0] * 50 + [0.5] * 50:
        mean, square = 0.9 * mean + 0.1 * size, 0.999 * square + 0.001 * size**2
    expected = mean / (1 - 0.9**100) / np.sqrt(square / (1 - 0.999**100))
    assert 0.6 < expected < 0.7
    np.testing.assert_allclose(last_update("skip"), -expected, rtol=1e-4)


def test_branch_that_differs_between_workers():
    def step(grads, otherwise):
        tx = skip()
        small = jnp.linalg.norm(grads["w"]) < 1.0  # of this worker
        return lax.cond(small, lambda: otherwise(grads), lambda: tx.update(grads, tx.init(LOCAL))[0])

    with pytest.raises(TypeError, match="cond branches must have equal output types"):
        each_worker("shard_map", lambda grads: step(grads, lambda grads: grads), 8)(GRADS)
    # Nothing is wrong with the types here, so JAX takes it. (Not run: it would hang.)
    each_worker("shard_map", lambda grads: step(grads, lambda grads: LOCAL), 8).lower(GRADS)
    # The right way: all workers take the same branch.

    def together(grads):
        tx = skip(0.0)
        small = lax.pmax(jnp.linalg.norm(grads["w"]), "data") < 1.0
        return lax.cond(small, lambda: LOCAL, lambda: tx.update(grads, tx.init(LOCAL))[0])

    np.testing.assert_allclose(each_worker("shard_map", together, 8)(GRADS)["w"][0], GRADS["w"].mean(0), atol=1e-6)


def test_model_axis_that_is_not_manual():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    grads = jax.device_put({"w": jnp.ones((4, 64, 64))}, NamedSharding(mesh, P("data", None, "model")))

    def largest_gather(run):
        text = run.lower(grads).compile().as_text()
        shapes = [shape for shape, kind in collectives(text) if kind == "all-gather"]
        return max(np.prod([int(n) for n in shape.split("[")[1].split("]")[0].split(",")]) for shape in shapes)

    def over_data_alone(tx):
        return jax.jit(
            jax.shard_map(
                lambda g: tx.update(jax.tree.map(lambda x: x[0], g), tx.init(None))[0],
                mesh=mesh,
                in_specs=P("data"),
                out_specs=P(),
                axis_names={"data"},
            )
        )

    wrong, right = over_data_alone(skip()), over_data_alone(skip(param_specs=P(None, "model")))
    assert largest_gather(wrong) == 64 * 64
    assert largest_gather(right) == 64 * 32
    np.testing.assert_array_equal(wrong(grads)["w"], 0.5)  # slower, not wrong
    np.testing.assert_array_equal(right(grads)["w"], 0.5)


def test_static_mode_forgets_a_worker():
    """What worker r alone knows about a slice that it is skipped in never arrives."""

    def contributions(mode):
        tx = skip(mode=mode)

        def local(g):
            def step(state, _):
                reduced, state = tx.update(g, state)
                return state, reduced

            return lax.scan(step, tx.init(LOCAL), None, length=200)[1]

        sums = np.asarray(jax.jit(jax.vmap(local, axis_name="data"))({"w": powers_of_two(8, 8)})["w"][0] * 8, np.int64)
        return ((sums[:, :, None] >> np.arange(8)) & 1).mean(0)

    assert sorted(set(contributions("static").ravel())) == [0.0, 1.0]
    assert 0.3 < contributions("random").min() <= contributions("random").max() < 0.7


def test_sixteen_bit_overflow():
    large = {"w": jnp.full((8, 16), 2e4, jnp.float16)}
    # Sums of up to N values travel in float16, as in psum: they overflow although the mean would not.
    assert jnp.isinf(updates(skip(0.0), True, large)["w"]).any()
    scaled = updates(optax.chain(optax.scale(1 / 8), skip(0.0), optax.scale(8.0)), True, large)
    np.testing.assert_allclose(scaled["w"], 2e4, rtol=1e-3)


def test_memory_is_kept():
    # Nothing of it can be seen without megabytes and a clock; but what the page says is what workers of a lab get.
    env = environment(make_plan(2, "1gbit"), 0, {}, {})
    page = (Path(__file__).parent.parent / "docs" / "sharp-bits.md").read_text()
    assert f"`GLIBC_TUNABLES={env['GLIBC_TUNABLES']}`" in page


def test_many_steps_in_flight():
    assert int(os.environ["NPROC"]) >= 16
    run = jax.jit(
        functools.partial(jax.shard_map, mesh=data_mesh(8), in_specs=P("data"), out_specs=P("data"), check_vma=False)(
            lambda x: sr.all_reduce(x, "data", num_skipped=4)
        )
    )
    x = jax.device_put(jnp.ones((8, 64)), NamedSharding(data_mesh(8), P("data")))
    for _ in range(300):
        x = run(x)
    assert x.block_until_ready().shape == (8, 64)
