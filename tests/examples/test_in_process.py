"""The examples that run in one process, on eight CPU devices."""

import re

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import jax_skipreduce as sr


@pytest.fixture(params=["flax_nnx", "flax_linen", "equinox_mlp", "pjit_auto", "pjit_explicit"])
def name(request):
    return request.param


@pytest.fixture
def train(name, load_example, monkeypatch):
    """Trains as the example does: (num_workers, skip_ratio) -> its parameters. Batches are the same for any number."""

    def run(num_workers: int, skip_ratio: float, num_steps: int = 8):
        module = load_example("pjit_tensor_parallel" if name.startswith("pjit") else name)
        monkeypatch.setattr(module, "LOCAL_BATCH", 256 // num_workers)
        if name in ("flax_nnx", "equinox_mlp"):
            return jax.tree.leaves(module.train(num_workers, num_steps, skip_ratio, 0)[0])
        if name == "flax_linen":
            return jax.tree.leaves(module.train(num_workers, num_steps, skip_ratio, 0)[0].params)
        axis_type = AxisType.Explicit if name == "pjit_explicit" else AxisType.Auto
        num_shards = 1 if num_workers == 1 else 2
        return jax.tree.leaves(module.train(num_workers, num_shards, num_steps, skip_ratio, axis_type, 0)[0])

    return run


@pytest.fixture
def plain_sgd(monkeypatch):
    """SGD in place of Adam, which is blind to the scale of a gradient and amplifies rounding."""
    monkeypatch.setattr(optax, "adam", lambda learning_rate: optax.sgd(0.1))


def gradients_of_one_worker(axis_name, skip_ratio, *, mesh=None, **settings):
    """In place of skipreduce, where there is one worker and so nothing to reduce."""
    if mesh is None:
        return optax.stateless(lambda grads, params: jax.lax.pmean(grads, axis_name))
    return optax.stateless(lambda grads, params: jax.tree.map(lambda leaf: leaf[0], grads))


class GradientsOfOneWorker:
    """In place of SkipReduce."""

    def __init__(self, axis_name, skip_ratio, **settings):
        self.transform = lambda: gradients_of_one_worker(axis_name, skip_ratio, **settings)

    def describe(self, *args, **settings):
        return ""


def test_learns_while_it_skips(name, load_example, capsys):
    if name.startswith("pjit"):
        accuracy = load_example("pjit_tensor_parallel").main(["--steps", "60", "--axes", name.removeprefix("pjit_")])
        # "up/kernel    (64, 256)  P(None, 'model')   (64, 128) per device"
        assert re.search(r"up/kernel .*'model'.*\(64, 128\) per device", capsys.readouterr().out)
    else:
        accuracy = load_example(name).main(["--steps", "60"])
    assert accuracy > 0.93


def shards_by_place(leaf) -> dict[str, set[bytes]]:
    """The bits that the devices hold, by the part of the array that they hold a copy of."""
    places: dict[str, set[bytes]] = {}
    for shard in leaf.addressable_shards:
        places.setdefault(str(shard.index), set()).add(np.asarray(shard.data).tobytes())
    return places


def test_reduces_gradients(name, train, plain_sgd, monkeypatch):
    num_workers = 4 if name.startswith("pjit") else 8
    full, skipped = train(num_workers, 0.0), train(num_workers, 0.5)
    monkeypatch.setattr(sr, "skipreduce", gradients_of_one_worker)
    monkeypatch.setattr(sr, "SkipReduce", GradientsOfOneWorker)
    expected = train(1, 0.0)

    # With nothing skipped, what one worker gets from the whole batch.
    assert len(full) == len(expected)
    for leaf, other in zip(full, expected, strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)
    # With half of it skipped, something else,
    assert any(np.abs(np.asarray(a) - np.asarray(b)).max() > 1e-3 for a, b in zip(full, skipped, strict=True))
    # and yet one model: no replica drifts.
    for leaf in skipped:
        assert len(leaf.addressable_shards) == 8
        assert all(len(copies) == 1 for copies in shards_by_place(leaf).values())
    # Parameters that are sharded over a model axis stay so.
    if name.startswith("pjit"):
        assert [len(shards_by_place(leaf)) for leaf in skipped] == [1, 2, 2, 2]  # down/bias is on all devices


def test_a_train_state_survives_the_checkpoint(load_example, tmp_path):
    example = load_example("flax_linen")
    state, _ = example.train(8, 2, 0.5, 0)
    restored = example.save_and_restore(str(tmp_path), state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for leaf, other in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
        np.testing.assert_array_equal(leaf, other)
    assert int(restored.opt_state[0].num_reductions) == 2


def test_says_what_is_missing(name, load_example):
    example = load_example("pjit_tensor_parallel" if name.startswith("pjit") else name)
    with pytest.raises(SystemExit, match="--workers 99"):
        example.main(["--workers", "99"])


def test_hierarchical(load_example, capsys):
    module = load_example("hierarchical")
    milliseconds = module.main(["--rounds", "2", "--mebibytes", "0.05"])
    assert list(milliseconds) == [
        *("lax.pmean", "flat ring of 8, nothing skipped", "flat ring of 8, half skipped"),
        *("2 hosts x 4, nothing skipped", "2 hosts x 4, half skipped"),
    ]
    assert "on each of 2 hosts x 4 devices, 2 rounds" in capsys.readouterr().out


def test_tensorboard(load_example, tmp_path):
    logged = load_example("tensorboard").main(["--logdir", str(tmp_path), "--steps", "41", "--log-every", "20"])
    assert (logged["skipreduce/step"], logged["skipreduce/num_skipped"]) == (40, 4)
    assert logged["loss"] < 2.3
    assert list(tmp_path.glob("events.out.tfevents.*"))
