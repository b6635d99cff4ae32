"""The example of sharded weights, on eight CPU devices, with a model smaller still."""

import re

import numpy as np
import pytest


@pytest.fixture
def example(load_example, monkeypatch):
    module = load_example("flax_fsdp")
    for name, value in {"SIZE": 16, "NUM_HEADS": 2, "HIDDEN_SIZE": 24, "NUM_LAYERS": 2, "NUM_TEST": 16}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_prints_what_is_sent_and_lost(example, capsys, tmp_path):
    (tmp_path / "text").write_text("To be, or not to be, that is the question.\n" * 100)
    names = ["nothing skipped", "RS", "RS + AG"]
    options = ["--steps", "12", "--orders", "1", "--seeds", "2", "--text", str(tmp_path / "text")]
    losses = example.main([*options, "--methods", *names])
    output = capsys.readouterr().out
    assert "8 workers, 4 of 7 steps skipped after 1 of 12 steps of training, 2 seed(s)" in output
    rows = re.findall(r"^\| (.+?) \| ([\d.]+) MB \| ([\d.]+)x \| ([\d.]+) \| ([\d.]+) \|", output, re.MULTILINE)
    assert [row[0] for row in rows] == names == list(losses)
    sent = [float(row[1]) for row in rows]
    assert sent == sorted(sent, reverse=True)
    assert all(float(row[4]) == pytest.approx(losses[row[0]], abs=1e-3) for row in rows)
    assert all(loss < np.log(256) for loss in losses.values())
    assert len(set(losses.values())) == 3  # what is left out does matter


def test_bytes_are_those_of_the_steps(example):
    none, scatter, gather, both = (example.num_bytes_sent(method, 8, 4) for method in example.METHODS)
    assert none - scatter == (none - both) / 3  # one half of a reduce-scatter, of an all-gather, and of the second one
    assert none - gather == 2 * (none - scatter)


def test_nothing_skipped_is_the_training_of_one_worker(example, monkeypatch):
    losses = {}
    for num_workers in (1, 8):
        monkeypatch.setattr(example, "LOCAL_BATCH", 32 // num_workers)
        mesh = example.data_mesh(num_workers)
        ((weights, *losses[num_workers]),) = example.train(
            mesh, example.METHODS[0], example.make_ends(mesh, None), 6, 0, 0, [3]
        )
        assert weights["layers"]["q"]["kernel"].shape == (2, 16, 2, 8)
    np.testing.assert_allclose(losses[1], losses[8], rtol=1e-4)


def test_says_what_is_missing(example):
    with pytest.raises(SystemExit, match="--workers 99"):
        example.main(["--workers", "99"])


def test_says_that_a_text_is_too_short(example, tmp_path):
    (tmp_path / "text").write_text("short")
    with pytest.raises(SystemExit, match="too short"):
        example.main(["--text", str(tmp_path / "text"), "--steps", "1"])
