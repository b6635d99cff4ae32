import functools
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
from jax_skipreduce._fsdp.cut import fsdp_cut, fsdp_join
from jax_skipreduce._fsdp.gather import fsdp_gather
from jax_skipreduce._fsdp.ring import ring_orders
from tests.helpers import (
    bits,
    collectives,
    count_collectives,
    data_mesh,
    each_worker,
    normal,
    powers_of_two,
    with_runners,
)


def holders(slice_index: int, order, num_skipped: int) -> set[int]:
    """Who has slice j after the all-gather without its last k steps, in the words of the paper.

    Worker j begins with it, and in each of N-1-k steps it comes to the next one on the ring.
    """
    order = [int(worker) for worker in order]
    start = order.index(slice_index)
    return {order[(start + number) % len(order)] for number in range(len(order) - num_skipped)}


def expected_mask(order, num_skipped: int) -> np.ndarray:
    """[r, j]: whether worker r has slice j."""
    workers = range(len(order))
    return np.array([[r in holders(j, order, num_skipped) for j in workers] for r in workers])


def in_expected(mask: np.ndarray) -> np.ndarray:
    """The sum that slice j's owner gets if worker r contributes 2**r."""
    return (2.0 ** np.arange(len(mask)) @ mask).astype(np.float32)


def gather_and_gradient(shard, *operands, normalize=None, **settings):
    """What a worker gets, and the gradient for its shard where worker r's cotangent is 2**r everywhere."""
    settings = {name: operands[value] if isinstance(value, slot) else value for name, value in settings.items()}
    whole, transpose = jax.vjp(lambda shard: fsdp_gather(shard, "data", normalize=normalize, **settings), shard)
    weight = (1 << lax.axis_index("data")).astype(whole.dtype)
    return whole, transpose(jnp.full_like(whole, weight))[0]


class slot(int):  # noqa: N801
    """Stands for an operand in the settings of `gather_and_gradient`: a traced value."""


def ones(num_workers, *shape, dtype=np.float32):
    return np.ones((num_workers, *shape), dtype)


NATURAL = np.arange
DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.parametrize("num_workers", [1, 2, 3, 6, 8, 12])
def test_the_slices_that_were_gathered_are_those_that_get_gradients(num_workers):
    traced = each_worker(
        "vmap", functools.partial(gather_and_gradient, num_gather_skipped=slot(0), num_skipped=slot(1)), num_workers
    )
    shards, last = normal((num_workers, 1)), num_workers - 1
    known = {(0, 0), (last // 2, 0), (0, last), (last // 2, last // 2 + last % 2), (last, 0)}
    for weights in range(num_workers):
        for grads in range(num_workers):
            mask = expected_mask(NATURAL(num_workers), weights)
            contributors = expected_mask(NATURAL(num_workers), max(weights, grads))
            assert not (contributors & ~mask).any()  # no gradient of what was not there
            results = [traced(shards, weights, grads)]
            if (weights, grads) in known:
                static = functools.partial(gather_and_gradient, num_gather_skipped=weights, num_skipped=grads)
                results.append(each_worker("vmap", static, num_workers)(shards))
            for whole, gradient in results:
                np.testing.assert_array_equal(whole, np.where(mask, np.asarray(shards)[:, 0], 0))
                np.testing.assert_array_equal(np.asarray(gradient)[:, 0], in_expected(contributors))


@pytest.mark.parametrize(("runner", "num_workers"), with_runners([1, 2, 3, 8]))
def test_every_way_to_run_with_moving_orders(num_workers, runner):
    run = each_worker(
        runner,
        functools.partial(gather_and_gradient, num_gather_skipped=num_workers // 2, step=slot(0), seed=7),
        num_workers,
    )
    orders = ring_orders(num_workers, 10)
    masks = [expected_mask(order, num_workers // 2) for order in orders]
    seen = set()
    for step in range(3 * len(orders)):
        whole, gradient = run(ones(num_workers, 2), step)
        mask = np.asarray(whole)[:, ::2] == 1
        assert bits(np.asarray(whole)[:, 1::2]) == bits(np.asarray(whole)[:, ::2])
        seen |= {number for number, other in enumerate(masks) if (other == mask).all()}
        assert any((other == mask).all() for other in masks)
        np.testing.assert_array_equal(gradient, np.tile(in_expected(mask)[:, None], (1, 2)))
    if runner == "shard_map":
        assert len(seen) > len(orders) // 2


def test_a_step_that_is_known_takes_the_order_of_one_that_is_traced():
    traced = each_worker("shard_map", lambda x, i: fsdp_gather(x, "data", num_gather_skipped=3, step=i, seed=5), 8)
    orders = set()
    for step in (0, 2, 2**31 - 1):
        known = each_worker(
            "shard_map", lambda x, i=step: fsdp_gather(x, "data", num_gather_skipped=3, step=i, seed=5), 8
        )
        assert bits(known(ones(8, 1))) == bits(traced(ones(8, 1), step))
        assert count_collectives(known, ones(8, 1)) == {"collective-permute": 4}
        orders.add(bits(known(ones(8, 1))))
    assert len(orders) > 1
    other_seed = each_worker("shard_map", lambda x, i: fsdp_gather(x, "data", num_gather_skipped=3, step=i, seed=6), 8)
    assert any(bits(other_seed(ones(8, 1), i)) != bits(traced(ones(8, 1), i)) for i in range(8))


def lacks(orders, num_skipped):
    """In how many orders worker a lacks the slice of worker b, [a, b], without a = b."""
    count = sum((~expected_mask(order, num_skipped)).astype(int) for order in orders)
    return count[~np.eye(orders.shape[1], dtype=bool)]


@pytest.mark.parametrize("num_workers", range(1, 34))
def test_orders_are_different_rings(num_workers):
    for num_orders in (1, 2, 3, 8, 100):
        orders = ring_orders(num_workers, num_orders)
        assert orders.shape[0] <= num_orders
        np.testing.assert_array_equal(np.sort(orders), np.tile(np.arange(num_workers), (len(orders), 1)))
        np.testing.assert_array_equal(orders[0], np.arange(num_workers))
        turned = {tuple(np.roll(order, -int(np.argmin(order)))) for order in orders}
        assert len(turned) == len(orders)


@pytest.mark.parametrize("num_workers", [3, 5, 7, 11, 13])
def test_of_a_prime_number_of_workers_each_lacks_each_other_equally_often(num_workers):
    orders = ring_orders(num_workers, 100)
    assert len(orders) == num_workers - 1
    for num_skipped in range(num_workers):
        assert set(lacks(orders, num_skipped)) == {num_skipped}


def test_what_eight_workers_lack():
    """The table of docs/fsdp.md: in how many of ten steps a worker lacks another one's slice, at least and at most."""
    orders = ring_orders(8, 10)
    assert len(orders) == 10
    expected = {k: (min(lacks(orders, k)), max(lacks(orders, k))) for k in range(1, 8)}
    page = (DOCS / "fsdp.md").read_text()
    rows = re.findall(r"^\| (\d) \| [\d.]+ \| (\d+) \| (\d+) \|$", page, re.MULTILINE)
    assert {int(k): (int(low), int(high)) for k, low, high in rows} == expected
    # Nobody is left out for good as long as anybody but the owner contributes.
    assert all(max(lacks(orders, k)) < 10 for k in range(7))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_dtypes_and_shapes(num_workers, dtype):
    dtype = jnp.dtype(dtype)
    shapes = {"a": (5, 7), "b": (), "c": (num_workers,), "d": (0, 3)}
    whole = {name: normal(shape, dtype, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    shards = jax.tree.map(lambda x: x.reshape(num_workers, -1), fsdp_cut(whole, num_workers))
    run = each_worker("shard_map", lambda shards: fsdp_gather(shards, "data", shape=shapes, num_skipped=0), num_workers)
    for name, rows in run(shards).items():
        assert rows.dtype == dtype
        assert rows.shape == (num_workers, *shapes[name])
        assert all(bits(row) == bits(whole[name]) for row in rows)
    joined = fsdp_join(fsdp_cut(whole, num_workers), jax.eval_shape(lambda: whole))
    assert all(bits(joined[name]) == bits(whole[name]) for name in whole)


def test_leaves_of_several_dtypes_travel_apart_and_all_others_together():
    shards = {"a": ones(8, 3), "b": ones(8, 2, 2), "c": jnp.ones((8, 5), jnp.bfloat16), "d": ones(8, 1)}

    def run(shards):
        whole, transpose = jax.vjp(lambda s: fsdp_gather(s, "data", num_gather_skipped=5, normalize=None), shards)
        return whole, transpose(whole)[0]

    jitted = each_worker("shard_map", run, 8)
    whole, gradient = jitted(shards)
    assert [leaf.shape for leaf in whole.values()] == [(8, 24), (8, 16, 2), (8, 40), (8, 8)]
    assert all(leaf.dtype == shards[name].dtype for name, leaf in gradient.items())
    assert all((np.asarray(leaf, np.float32) == 3).all() for leaf in gradient.values())
    sent = collectives(jitted.lower(shards).compile().as_text())
    assert sorted(sent) == sorted(
        2 * [("f32[8]{0}", "collective-permute")] * 2 + 2 * [("u16[5]{0}", "collective-permute")] * 2
    )


@pytest.mark.parametrize("normalize", ["skip", "drop", None])
@pytest.mark.parametrize("traced", [False, True])
def test_normalize(normalize, traced):
    skip = slot(0) if traced else 2
    run = each_worker(
        "shard_map",
        functools.partial(gather_and_gradient, num_gather_skipped=skip, num_skipped=3, normalize=normalize),
        8,
    )
    divisor = {"skip": 8, "drop": 5, None: 1}[normalize]
    sums = in_expected(expected_mask(NATURAL(8), 3))
    args = (ones(8, 1), 2) if traced else (ones(8, 1),)
    np.testing.assert_allclose(np.asarray(run(*args)[1])[:, 0], sums / np.float32(divisor), rtol=1e-6)


def test_without_alignment_gradients_of_missing_weights_are_contributed():
    run = each_worker(
        "shard_map", functools.partial(gather_and_gradient, num_gather_skipped=4, num_skipped=1, align=False), 8
    )
    whole, gradient = run(ones(8, 1))
    np.testing.assert_array_equal(whole, expected_mask(NATURAL(8), 4))
    np.testing.assert_array_equal(np.asarray(gradient)[:, 0], in_expected(expected_mask(NATURAL(8), 1)))


@pytest.mark.parametrize("order", [0, 1, 2, 5])
@pytest.mark.parametrize(("dtype", "wire_dtype"), [("float32", None), ("float32", "bfloat16"), ("bfloat16", None)])
def test_sums_are_those_of_the_chain_to_the_bit(order, dtype, wire_dtype, monkeypatch):
    order = ring_orders(8, 10)[order]
    # Any order, first.
    monkeypatch.setattr("jax_skipreduce._fsdp.ring.ring_orders", lambda *_: order[None])
    cotangents = normal((8, 24), jnp.dtype(dtype))

    def gradient(x):
        shard = x[:3] * 0
        return jax.vjp(
            lambda s: fsdp_gather(s, "data", num_skipped=2, step=0, normalize=None, wire_dtype=wire_dtype), shard
        )[1](x)[0]

    rounded = jnp.dtype(wire_dtype or dtype)
    slices = np.asarray(cotangents.astype(jnp.float32)).reshape(8, 8, 3)
    expected = np.zeros((8, 3), np.float32)
    for place, owner in enumerate(order):
        chain = [order[(place + distance) % 8] for distance in range(5, -1, -1)]
        total = slices[chain[0], owner]
        for worker in chain[1:]:
            total = np.asarray(jnp.asarray(total).astype(rounded).astype(jnp.float32)) + slices[worker, owner]
        expected[owner] = total
    expected = jnp.asarray(expected).astype(dtype)
    assert bits(each_worker("shard_map", gradient, 8)(cotangents)) == bits(expected)


def test_half_the_bytes_with_a_wire_dtype():
    def run(x, step):
        value_and_grad = jax.value_and_grad(
            lambda x: jnp.sum(
                fsdp_gather(x, "data", num_gather_skipped=3, num_skipped=5, step=step, wire_dtype="bfloat16") ** 2
            )
        )
        return value_and_grad(x)[1]

    jitted = each_worker("shard_map", lambda x: run(x, 0), 8)
    sent = collectives(jitted.lower(normal((8, 100))).compile().as_text())
    assert sent == [("u16[100]{0}", "collective-permute")] * (4 + 2)
    whole = each_worker("shard_map", lambda x: fsdp_gather(x, "data", wire_dtype="bfloat16"), 8)(normal((8, 100)))
    skipped = each_worker(
        "shard_map", lambda x: fsdp_gather(x, "data", wire_dtype="bfloat16", num_gather_skipped=1), 8
    )(normal((8, 100)))
    rounded = np.asarray(normal((8, 100)).astype(jnp.bfloat16).astype(jnp.float32)).reshape(-1)
    np.testing.assert_array_equal(whole, np.tile(rounded, (8, 1)))  # the own slice, too
    assert set(np.unique(np.asarray(skipped)[0])) == {0, *rounded[:100], *rounded[200:]}


@pytest.mark.parametrize(("weights", "grads"), [(0, 0), (0, 4), (4, 0), (4, 4), (2, 5), (7, 7)])
def test_the_steps_on_the_wire_are_those_that_were_not_skipped(weights, grads):
    def gradient(x):
        return jax.grad(lambda x: jnp.sum(fsdp_gather(x, "data", num_gather_skipped=weights, num_skipped=grads) ** 2))(
            x
        )

    counts = count_collectives(each_worker("shard_map", gradient, 8), ones(8, 10))
    scatter = 7 - max(weights, grads)
    assert counts.get("all-gather", 0) == (weights == 0)
    assert counts.get("collective-permute", 0) == scatter + (7 - weights if weights else 0)
    assert set(counts) <= {"all-gather", "collective-permute"}


@pytest.mark.parametrize("num_orders", [1, 2, 8])
def test_each_order_is_a_branch(num_orders):
    def gradient(x, step):
        return jax.grad(
            lambda x: jnp.sum(fsdp_gather(x, "data", num_gather_skipped=5, step=step, num_orders=num_orders) ** 2)
        )(x)

    counts = count_collectives(each_worker("shard_map", gradient, 8), ones(8, 10), 0)
    assert counts == {"collective-permute": num_orders * 2 * 2}


# Training

SIZE, LAYERS, ROWS = 6, 3, 16  # 36 elements a layer: slices of 5 of them, the last one padded


def loss_of(params, batch):
    x, y = batch
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer)
    return jnp.mean((x @ params["head"] - y) ** 2)


def make_training(seed=0):
    params = {"layers": normal((LAYERS, SIZE, SIZE), seed=seed) / 2, "head": normal((SIZE,), seed=seed + 1)}
    batch = (normal((8 * ROWS, SIZE), seed=seed + 2), normal((8 * ROWS,), seed=seed + 3))
    return params, batch


def cut(params):
    return {
        "layers": jax.vmap(lambda layer: fsdp_cut(layer, 8))(params["layers"]),
        "head": fsdp_cut(params["head"], 8),
    }


SPECS = {"layers": P(None, "data"), "head": P("data")}


def sharded_loss(shards, batch, step, remat=True, num_orders=2, **settings):
    x, y = batch

    def layer(x, inputs):
        shard, number = inputs
        weights = fsdp_gather(
            shard, "data", shape=(SIZE, SIZE), step=step * LAYERS + number, num_orders=num_orders, **settings
        )
        return jnp.tanh(x @ weights), None

    x, _ = lax.scan(jax.checkpoint(layer) if remat else layer, x, (shards["layers"], jnp.arange(LAYERS)))
    return jnp.mean((x @ fsdp_gather(shards["head"], "data", shape=(SIZE,)) - y) ** 2)


def make_sharded_step(loss, tx, check_vma=True, axis_type=AxisType.Auto):
    """(jitted step, function that puts things in place)."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    state_specs = jax.tree_util.tree_map_with_path(
        lambda path, leaf: SPECS[path[-1].key] if leaf.ndim else P(),
        jax.eval_shape(tx.init, jax.eval_shape(cut, make_training()[0])),
    )

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(SPECS, state_specs, P("data"), P()),
        out_specs=(SPECS, state_specs, P()),
        check_vma=check_vma,
    )
    def train_step(shards, state, batch, step):
        value, grads = jax.value_and_grad(loss)(shards, batch, step)
        updates, state = tx.update(grads, state, shards)
        return optax.apply_updates(shards, updates), state, lax.pmean(value, "data")

    def place(tree, specs):
        return jax.device_put(tree, jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))

    def start(params, batch):
        shards = place(cut(params), SPECS)
        state = jax.tree.map(lambda leaf, spec: place(leaf, spec), tx.init(cut(params)), state_specs)
        return shards, state, place(batch, (P("data"), P("data")))

    return train_step, start


@pytest.mark.promotes
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_with_nothing_skipped_it_is_plain_data_parallel_training(optimizer, check_vma):
    tx = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-2)}[optimizer]
    params, batch = make_training()
    train_step, start = make_sharded_step(sharded_loss, tx, check_vma)
    shards, state, sharded_batch = start(params, batch)
    plain_state = tx.init(params)
    for step in range(10):
        shards, state, value = train_step(shards, state, sharded_batch, step)
        plain_value, grads = jax.value_and_grad(loss_of)(params, batch)  # the mean over all rows
        updates, plain_state = tx.update(grads, plain_state)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(value, plain_value, rtol=1e-5)
    layers = jax.vmap(lambda layer: fsdp_join(layer, (SIZE, SIZE)))(jax.device_get(shards["layers"]))
    np.testing.assert_allclose(layers, params["layers"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(fsdp_join(jax.device_get(shards["head"]), (SIZE,)), params["head"], rtol=1e-4, atol=1e-5)


@pytest.mark.promotes
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_warm_up_by_schedule_compiles_once_and_learns(axis_type):
    def loss(shards, batch, step):
        skip = jnp.where(step < 5, 0, 4)
        return sharded_loss(shards, batch, step, num_gather_skipped=skip, num_skipped=skip, normalize="drop")

    params, batch = make_training()
    tx = optax.adam(1e-2)
    train_step, start = make_sharded_step(loss, tx, axis_type=axis_type)
    shards, state, placed = start(params, batch)
    values = []
    for step in range(40):
        shards, state, value = train_step(shards, state, placed, step)
        values.append(float(value))
        if step == 4:  # nothing is skipped so far
            plain, plain_state = params, tx.init(params)
            for plain_value in values:
                expected, grads = jax.value_and_grad(loss_of)(plain, batch)
                np.testing.assert_allclose(plain_value, expected, rtol=1e-4)
                updates, plain_state = tx.update(grads, plain_state)
                plain = optax.apply_updates(plain, updates)
    assert train_step._cache_size() == 1
    assert np.mean(values[-5:]) < 0.7 * values[0]


def grads_of(remat, jit=True, **settings):
    params, batch = make_training()

    def local(shards, batch, step):
        loss = functools.partial(sharded_loss, remat=remat, num_gather_skipped=3, num_skipped=4, **settings)
        return jax.grad(loss)(shards, batch, step)

    run = jax.shard_map(local, mesh=data_mesh(8), in_specs=(SPECS, P("data"), P()), out_specs=SPECS)
    return jax.jit(run), (cut(params), batch, jnp.int32(3))


def test_under_checkpoint_weights_are_gathered_again_and_not_kept():
    (kept, args), (again, _) = grads_of(False, num_orders=1), grads_of(True, num_orders=1)
    for leaf, other in zip(jax.tree.leaves(kept(*args)), jax.tree.leaves(again(*args)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-7)
    # In the loop over layers: 4 steps to gather, 3 to reduce; 7 more for the head's gradient.
    assert count_collectives(kept, *args)["collective-permute"] == 4 + 3 + 7
    assert count_collectives(again, *args)["collective-permute"] == 4 + 4 + 3 + 7
    # What the forward pass keeps for the backward pass, stacked by layer.
    stacked = f"f32[{LAYERS},{SIZE},{SIZE}]"
    assert stacked in kept.lower(*args).compile().as_text()
    assert stacked not in again.lower(*args).compile().as_text()


@pytest.mark.parametrize("runner", ["shard_map", "shard_map_unchecked", "vmap"])
def test_a_traced_count_under_checkpoint_and_scan_gives_the_bits_of_a_known_one(runner):
    """Weights 3 and gradients 4 skipped."""

    def local(inputs, counts, step):
        shards, batch = inputs
        settings = (
            {"num_gather_skipped": 3, "num_skipped": 4} if counts is None else dict(zip(COUNTS, counts, strict=True))
        )
        return jax.grad(functools.partial(sharded_loss, **settings))(shards, batch, step)

    params, batch = make_training()
    cut_params = cut(params)
    shards = {
        "layers": jnp.swapaxes(cut_params["layers"].reshape(LAYERS, 8, -1), 0, 1),
        "head": cut_params["head"].reshape(8, -1),
    }
    inputs = (shards, jax.tree.map(lambda x: x.reshape(8, ROWS, *x.shape[1:]), batch))
    known = each_worker(runner, lambda x, step: local(x, None, step), 8)
    traced = each_worker(runner, local, 8)
    for step in range(3):
        for leaf, other in zip(
            jax.tree.leaves(known(inputs, step)), jax.tree.leaves(traced(inputs, (3, 4), step)), strict=True
        ):
            np.testing.assert_allclose(leaf, other, rtol=1e-6, atol=1e-7)


COUNTS = ("num_gather_skipped", "num_skipped")


@pytest.mark.parametrize("check_vma", [True, False])
def test_differentiated_from_outside_of_shard_map(check_vma):
    """The gradient of a sum over the workers: what each of them gets is reduced in the same way."""
    gather = jax.shard_map(
        lambda x, step: fsdp_gather(x, "data", num_gather_skipped=2, step=step, normalize=None)[None],
        mesh=data_mesh(8),
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    weights = 2.0 ** jnp.arange(8, dtype=jnp.float32)[:, None]
    gradient = jax.jit(jax.grad(lambda shards, step: jnp.sum(gather(shards, step) * weights)))(jnp.ones(8), 1)
    np.testing.assert_array_equal(gradient, in_expected(np.asarray(jax.jit(gather)(jnp.ones(8), 1)) == 1))


@pytest.mark.parametrize("names", [("pod", "data"), ("data", "pod")])
@pytest.mark.parametrize("check_vma", [True, False])
def test_two_data_axes_beside_a_model_axis(names, check_vma):
    mesh = jax.make_mesh((2, 2, 2), ("pod", "model", "data"), axis_types=(AxisType.Auto,) * 3)

    def local(shard, step):
        whole, transpose = jax.vjp(
            lambda x: fsdp_gather(x, names, num_gather_skipped=1, step=step, normalize=None), shard.reshape(-1)
        )
        rank = lax.axis_index(("pod", "data"))
        gradient = transpose(whole * 0 + (1 << rank).astype(jnp.float32))[0]
        return whole.reshape(1, 1, 1, -1), gradient.reshape(1, 1, 1, -1)

    spec = P("pod", "model", "data")
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(spec, P()), out_specs=(spec, spec), check_vma=check_vma))
    shards = 1 + jnp.arange(8.0).reshape(2, 2, 2)
    masks = [expected_mask(order, 1) for order in ring_orders(4, 10)]
    for step in range(4):
        whole, gradient = run(shards, step)
        for model in range(2):
            rows = np.asarray(whole)[:, model].reshape(4, 4)
            mask = rows != 0
            assert any((mask == other).all() for other in masks)
            np.testing.assert_array_equal(rows, np.where(mask, np.asarray(shards)[:, model].reshape(-1), 0))
            np.testing.assert_array_equal(np.asarray(gradient)[:, model].reshape(-1), in_expected(mask))


# ZeRO-1 and ZeRO-2: full weights, sharded optimizer state


@pytest.mark.promotes
@pytest.mark.parametrize("num_skipped", [0, 4])
def test_zero_by_the_collectives_of_the_core(num_skipped):
    """The code of docs/fsdp.md: whole weights on each worker, moments sharded."""
    params, batch = make_training()
    tx = optax.adam(1e-2)
    state_specs = jax.tree.map(
        lambda leaf: P("data") if leaf.ndim else P(),
        jax.eval_shape(tx.init, jax.eval_shape(lambda: fsdp_cut(params, 8))),
    )

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=data_mesh(8), in_specs=(P(), state_specs, P("data")), out_specs=(P(), state_specs)
    )
    def train_step(params, state, batch):
        _, grads = sr.local_value_and_grad(loss_of, "data")(params, batch)
        scatter = functools.partial(sr.reduce_scatter, axis_name="data", shift=-1, num_skipped=num_skipped)
        grads = jax.tree.map(lambda g: scatter(g), grads)
        rank = lax.axis_index("data")
        own = jax.tree.map(lambda p: fsdp_cut(p, 8).reshape(8, -1)[rank], params)
        updates, state = tx.update(grads, state, own)
        own = optax.apply_updates(own, updates)
        return jax.tree.map(lambda x, p: sr.all_gather(x, "data", shift=-1, shape=p.shape), own, params), state

    reduction = sr.skipreduce("data", num_skipped / 8, mode="static", min_size=0)
    plain = optax.chain(reduction, tx)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=data_mesh(8), in_specs=(P(), P(), P("data")), out_specs=(P(), P()))
    def plain_step(params, state, batch):
        _, grads = sr.local_value_and_grad(loss_of, "data")(params, batch)
        updates, state = plain.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, expected, plain_state = tx.init(fsdp_cut(params, 8)), params, plain.init(params)
    for _ in range(5):
        params, state = train_step(params, state, batch)
        expected, plain_state = plain_step(expected, plain_state, batch)
    if num_skipped == 0:
        assert_close(params, expected)
    assert state[0].mu["layers"].sharding.spec == P("data")
    assert count_collectives(train_step, params, state, batch) == {
        "collective-permute": 2 * (7 - num_skipped),  # a ring for each of two leaves
        "all-gather": 2,
    }


def assert_close(tree, expected):
    for leaf, other in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)


@pytest.mark.promotes
def test_zero_by_one_gather_of_all_weights():
    """The code of docs/fsdp.md: one gather per step, from shards that the optimizer updates, in moving orders."""
    params, batch = make_training()
    shapes = jax.eval_shape(lambda: params)
    tx = optax.adam(1e-2)
    is_sharded = jax.tree.map(
        lambda leaf: P("data") if leaf.ndim else P(),
        jax.eval_shape(tx.init, jax.eval_shape(lambda: fsdp_cut(params, 8))),
    )

    def train(skip):
        @jax.jit
        @functools.partial(
            jax.shard_map,
            mesh=data_mesh(8),
            in_specs=(P("data"), is_sharded, P("data"), P()),
            out_specs=(P("data"), is_sharded),
        )
        def train_step(shards, state, batch, step):
            def loss(shards):
                return loss_of(fsdp_gather(shards, "data", shape=shapes, num_skipped=skip, step=step), batch)

            updates, state = tx.update(jax.grad(loss)(shards), state, shards)
            return optax.apply_updates(shards, updates), state

        shards = fsdp_cut(params, 8)
        state = tx.init(shards)
        counts = count_collectives(train_step, shards, state, batch, 0)
        for step in range(5):
            shards, state = train_step(shards, state, batch, step)
        return fsdp_join(shards, shapes), counts

    expected, state = params, tx.init(params)
    for _ in range(5):
        updates, state = tx.update(jax.grad(loss_of)(expected, batch), state)
        expected = optax.apply_updates(expected, updates)
    trained, counts = train(0)
    assert_close(trained, expected)
    assert counts == {"all-gather": 1, "collective-permute": 7}
    trained, counts = train(4)
    assert counts == {"all-gather": 1, "collective-permute": 10 * 3}
    assert loss_of(trained, batch) < loss_of(params, batch)


# Errors


def under(num_workers, check_vma=True, spec=None):
    def run(function, x):
        return jax.eval_shape(
            jax.shard_map(
                function,
                mesh=data_mesh(num_workers),
                in_specs=P("data") if spec is None else spec,
                out_specs=P("data"),
                check_vma=check_vma,
            ),
            x,
        )

    return run


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_gather_skipped": 8}, ValueError, r"num_gather_skipped=8: expected 0\.\.7 for 8 workers"),
        ({"num_skipped": -1}, ValueError, r"num_skipped=-1: expected 0\.\.7"),
        ({"num_skipped": 0.5}, TypeError, r"num_skipped=0\.5 \(float\): expected an integer"),
        ({"step": 1.0}, TypeError, r"step=1\.0 \(float\): expected an integer"),
        ({"num_orders": 0}, ValueError, r"num_orders=0: expected an int, at least 1"),
        ({"normalize": "mean"}, ValueError, r"normalize='mean'"),
        ({"wire_dtype": "int8"}, ValueError, r"wire_dtype=int8"),
        (
            {"shape": (3, 5)},
            ValueError,
            r"shape=\(3, 5\) for shard '\(root\)': 15 elements over 8 workers make slices of 2",
        ),
        ({"shape": {"a": (3,)}}, ValueError, r"expected for each array the shape of the whole"),
        ({"shape": 24}, ValueError, r"shape=24: expected for each array"),
        ({"axis_name": "model"}, ValueError, r"no axis 'model' is bound here"),
    ],
)
def test_errors(settings, error, message):
    settings = {"axis_name": "data", **settings}
    with pytest.raises(error, match=message):
        under(8)(lambda x: fsdp_gather(x, **settings), jnp.ones(24))


def test_errors_that_name_the_shard():
    with pytest.raises(TypeError, match=r"shard 'n' has dtype int32: expected floats"):
        under(8)(lambda x: fsdp_gather({"w": x, "n": x.astype(jnp.int32)}, "data"), jnp.ones(24))
    with pytest.raises(TypeError, match=r"shard 'w' is 1\.0 \(float\): expected an array"):
        under(8)(lambda x: fsdp_gather({"w": 1.0}, "data"), jnp.ones(24))
    with pytest.raises(ValueError, match=r"shard '\(root\)' is the same on all workers of 'data', so it is no shard"):
        under(8, spec=P())(lambda x: fsdp_gather(x, "data"), jnp.ones(24))
    with pytest.raises(ValueError, match=r"shard '\(root\)' is a scalar"):
        under(8)(lambda x: fsdp_gather(x[0], "data"), jnp.ones(24))
    with pytest.raises(ValueError, match="num_workers=0"):
        fsdp_cut(jnp.ones(3), 0)
    with pytest.raises(ValueError, match=r"leaf 'w' has 3 elements, fewer than its shape \(2, 2\)"):
        fsdp_join({"w": jnp.ones(3)}, {"w": (2, 2)})


@pytest.mark.parametrize("name", ["num_gather_skipped", "num_skipped", "step"])
def test_a_count_that_differs_between_workers(name):
    with pytest.raises(ValueError, match=f"{name} varies over data"):
        under(8)(lambda x: fsdp_gather(x, "data", **{name: lax.axis_index("data")}), jnp.ones(24))


def test_a_traced_count_out_of_range_is_clamped():
    run = each_worker("shard_map", lambda x, k: fsdp_gather(x, "data", num_gather_skipped=k), 8)
    for count, clamped in ((-3, 0), (99, 7)):
        np.testing.assert_array_equal(run(ones(8, 1), count), expected_mask(NATURAL(8), clamped))


def test_powers_of_two_have_room():
    assert powers_of_two(8, 1).sum() == 255  # the oracle is exact in bfloat16, too


# What docs/fsdp.md shows


@pytest.fixture
def page_code():
    return re.findall(r"```python\n(.*?)```", (DOCS / "fsdp.md").read_text(), re.DOTALL)


@pytest.mark.promotes
def test_the_code_of_the_page_trains(page_code):
    names = {}
    exec(page_code[0], names)
    batch = {"x": normal((16, 64)), "y": jnp.zeros((16, 64))}
    shards, losses = names["shards"], []
    for step in (0, 1, 2, 100, 101, 102):
        shards, loss = names["train_step"](shards, batch, step)
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)
    assert shards.sharding.shard_shape(shards.shape) == (4, 64 * 64 // 8)

    params = {"w": normal((64, 64)) / 8}
    names |= {
        "whole_loss": lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2),
        "shapes": jax.eval_shape(lambda: params),
    }
    exec(page_code[1], names)
    before = names["whole_loss"](params, batch)
    trained = fsdp_join(names["zero_step"](fsdp_cut(params, 8), batch, 0), names["shapes"])
    assert names["whole_loss"](trained, batch) < before


def test_a_step_that_is_known_under_set_mesh():
    mesh = data_mesh(4)

    def gather(shard, step):
        return fsdp_gather(shard, "data", num_gather_skipped=1, step=step, seed=3)

    def run(step):
        with jax.set_mesh(mesh):
            return jax.jit(jax.shard_map(lambda x: gather(x, step)[None], in_specs=P("data"), out_specs=P("data")))(
                jax.device_put(normal((16, 3)), jax.NamedSharding(mesh, P("data")))
            )

    np.testing.assert_array_equal(run(5), run(jnp.int32(5)))


@pytest.mark.parametrize("seed", [-1, 2**32, True, 0.5])
def test_seeds_are_32_bits(seed):
    with pytest.raises(ValueError, match="seed="):
        jax.vmap(lambda x: fsdp_gather(x, "data", step=1, seed=seed), axis_name="data")(jnp.ones((4, 2)))
