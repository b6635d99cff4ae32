"""examples/importance.py: one training with its tables and picture, and the comparison."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_skipreduce as sr


@pytest.fixture
def example(load_example, monkeypatch):
    """With a small network, which compiles fast."""
    module = load_example("importance")
    load = module.load

    def load_small(name):
        task = load("text")
        few = tuple(array[:32] for array in task.test)
        return dataclasses.replace(task, model=module.TextNet(num_layers=1, size=32), test=few, batch=4)

    monkeypatch.setattr(module, "load", load_small)
    return module


def test_the_networks_are_what_the_docs_measure(load_example):
    module = load_example("importance")
    for name, num_leaves in (("digits", 26), ("text", 36)):
        task = module.load(name)
        params = jax.eval_shape(lambda task=task: task.init(0))
        assert len(jax.tree.leaves(params)) == num_leaves
        loss, accuracy = jax.eval_shape(task.score, params, *task.test)
        assert (loss.shape, accuracy.shape) == ((), ())


def test_one_training(example, capsys, tmp_path):
    accuracy = example.main(["--steps", "40", "--figure", str(tmp_path / "importance.png")])
    printed = capsys.readouterr().out
    # One character in four is a space.
    assert 0.15 < accuracy < 1
    assert re.search(r"^Protected: \d of \d+ leaves", printed, re.MULTILINE)
    assert len(re.findall(r"^step +\d+ ", printed, re.MULTILINE)) == 10
    assert (tmp_path / "importance.png").read_bytes().startswith(b"\x89PNG")


def test_comparison(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "MAX_PROTECTED_RATIO", 0.2)
    # As --compare does with more ratios and seeds.
    example.compare(example.Trainer(example.load("text"), num_steps=10), num_seeds=1, skip_ratios=(0.5,))
    printed = capsys.readouterr().out
    rows = re.findall(r"^(0\S*) +(-|nothing|the choice|others) +(\d\.\d{4}) ", printed, re.MULTILINE)
    assert [(ratio, name) for ratio, name, _ in rows] == [
        ("0", "-"),
        *(("0.5", name) for name in ("nothing", "the choice", "others")),
    ]
    # Each is another training, of the same start.
    assert len({loss for _, _, loss in rows}) == 4


def test_others_are_others(load_example):
    module = load_example("importance")
    params = {name: np.zeros(size, np.float32) for name, size in zip("abcdefg", [3, 2, 3, 3, 2, 60, 27], strict=True)}
    importance = {"a": 0.9, "b": 0.8, "c": 0.3, "d": 0.2, "e": 0.1, "f": 0.2, "g": 0.1}
    chosen = sr.choose_protected(importance, params, min_size=0)
    assert chosen.paths == ("a", "b")
    drawn = {module.others(chosen, seed).paths for seed in range(30)}
    assert drawn == {("c", "e"), ("d", "e")}


def test_running_average(load_example):
    module = load_example("importance")
    rng = np.random.default_rng(0)
    grads = [
        {"a": jnp.asarray(rng.normal(size=(4, 40))), "b": jnp.asarray(2 * rng.normal(size=(4, 9)))} for _ in range(12)
    ]
    average = {"a": jnp.float32(0), "b": jnp.float32(0)}
    expected = np.zeros(2)
    for number, each in enumerate(grads):
        average = module.averaged(average, each, number)
        shares = [sr.importance(jax.tree.map(lambda x, rank=rank: x[rank], each)) for rank in range(4)]
        sample = np.mean([[share["a"], share["b"]] for share in shares], axis=0)
        # The plain mean of ten samples; from then on each new one counts for a tenth.
        expected += (sample - expected) / min(number + 1, 10)
    np.testing.assert_allclose([average["a"], average["b"]], expected, rtol=1e-5)


def test_rank_correlation(load_example):
    spearman = load_example("importance").spearman
    # With ties as scipy.stats.spearmanr has it.
    assert spearman([1, 2, 2, 4, 5], [2, 1, 3, 3, 9]) == pytest.approx(0.763157894736842)
    assert spearman([3, 1], [1, 3]) == pytest.approx(-1)
    for first, second in (([], []), ([1], [2]), ([1, 1], [1, 2]), ([1, 2], [0, 0])):
        assert math.isnan(spearman(first, second))


def test_stability(load_example, capsys):
    module = load_example("importance")
    params = {"a": jnp.zeros(9), "b": jnp.zeros(8), "c": jnp.zeros(83)}
    snapshots = {
        f"epoch {number}": sr.choose_protected({"a": a, "b": b, "c": 0.1}, params, 0.1, min_size=1)
        for number, (a, b) in enumerate([(0.9, 0.5), (0.6, 0.8)], start=1)
    }
    module.print_stability(snapshots)
    assert capsys.readouterr().out.startswith(
        "snapshot  rho previous  rho first  protected  in first  holds  first holds\n"
        "--------------------------------------------------------------------------\n"
        "epoch 1              -          -       9.0%         -  39.7%        39.7%\n"
        "epoch 2           0.50       0.50       8.0%        0%  31.8%        26.9%\n"
        "--------------------------------------------------------------------------\n"
        "mean              0.50       0.50       8.5%        0%  35.8%        33.3%\n"
        "rho: rank correlation (Spearman) of the importance of 3 leaves with"
    )
    nothing = sr.choose_protected({"a": 0.1, "b": 0.1, "c": 0.1}, params, 0.1, min_size=1)
    assert (module.overlap(nothing, nothing), module.overlap(snapshots["epoch 1"], nothing)) == (1, 0)
