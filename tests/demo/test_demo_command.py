"""`skipreduce demo`, as users call it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

import jax_skipreduce as sr
from jax_skipreduce.__main__ import make_app
from jax_skipreduce.programs.common import data
from jax_skipreduce.programs.common.records import write_json
from jax_skipreduce.programs.demo import _figure, _report, _settings, _training

pytestmark = pytest.mark.promotes

# Few steps, so that it is the program that is tested, not the training.
SHORT = ("--steps", "6", "--batch-size", "4")


def run(*arguments):
    """Exit code and output, as one line of words without the lines of tables and boxes."""
    result = CliRunner().invoke(make_app(), ["demo", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(re.sub(r"[^\x20-\x7e]+", " ", result.output).split())


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def settings(**changes):
    values = {
        "skip_ratio": 0.5,
        "mode": _settings.Mode.RANDOM,
        "normalize": _settings.Normalize.SKIP,
        "num_workers": 8,
        "num_steps": 6,
        "batch_size": 4,
        "optimizer": _settings.Optimizer.ADAM,
        "learning_rate": 2e-3,
        "partition": data.Partition.IID,
        "data": data.DataName.DIGITS,
        "seeds": (0,),
    }
    return _settings.Settings(**(values | changes))


def test_writes_table_picture_and_figures(tmp_path):
    code, output = run(*SHORT, "--seeds", "2", "--json", "figures.json")
    assert code == 0, output
    figures = json.loads(Path("figures.json").read_text())
    assert Path("skipreduce-demo.png").read_bytes().startswith(b"\x89PNG")

    model = _training.SmallCNN()
    images = data.load(data.DataName.DIGITS).train_images[:1]
    params = jax.eval_shape(model.init, jax.random.key(0), images)
    described = sr.describe(params, 8, skip_ratio=0.5)
    assert figures["per_step"]["num_skipped"] == described.num_skipped == 4
    assert figures["full_reduction"]["sent_bytes_per_worker"] == described.full_wire_bytes * 6
    assert figures["skipping"]["sent_bytes_per_worker"] == described.wire_bytes * 6
    assert figures["share_of_bytes_saved"] == pytest.approx(1 - described.wire_bytes / described.full_wire_bytes)
    assert figures["share_of_gradient_left_out"] == pytest.approx(
        described.num_skipped_elements / described.num_elements
    )
    assert figures["theoretical_speedup"] == described.theoretical_speedup
    # The network is one that shows what skipping is for: most of the gradient can be skipped.
    assert figures["share_of_gradient_left_out"] > 0.49

    for method in ("full_reduction", "skipping"):
        runs = figures[method]["runs"]
        assert [run["seed"] for run in runs] == [0, 1]
        for one in runs:
            assert len(one["curves"]["training_loss"]) == 6
            assert one["curves"]["evaluated_steps"] == [1, 2, 3, 4, 5, 6]
            assert one["test_accuracy"] == one["curves"]["test_accuracy"][-1]
        assert runs[0]["curves"] != runs[1]["curves"]
        mean = (runs[0]["test_accuracy"] + runs[1]["test_accuracy"]) / 2
        assert figures[method]["test_accuracy"] == pytest.approx(mean)
        assert f"{mean * 100:.1f} %" in output
    # The first loss is that of the initial parameters, before the methods differ.
    first = [figures[method]["runs"][0]["curves"]["training_loss"][0] for method in ("full_reduction", "skipping")]
    assert first[0] == first[1]
    assert figures["settings"]["num_workers"] == 8
    assert figures["versions"]["jax_skipreduce"] == sr.__version__

    for words in ("test accuracy (mean of 2 seeds)", "skipping 50 % (random)", "1.40x faster", "share its memory"):
        assert words in output
    assert f"{described.wire_bytes * 6 / 1e6:.1f} MB" in output


def losses_and_accuracies(chosen, *reductions, seed=0):
    """Of one training per reduction, all with the same seed."""
    trainer = _training.Trainer(chosen, data.load(chosen.data), jax.devices("cpu")[: chosen.num_workers])
    runs = [trainer.run(reduction, seed, lambda step, loss, accuracy: None) for reduction in reductions]
    return [(run.losses, run.accuracies) for run in runs]


def test_skipping_nothing_is_full_reduction():
    chosen = settings(skip_ratio=0.0, num_workers=2)
    reductions = (_training.full_reduction(), _training.skipping(chosen, seed=0).transform())
    (full, _), (skipping, _) = losses_and_accuracies(chosen, *reductions)
    assert full == pytest.approx(skipping, rel=1e-4)


def test_the_same_seed_gives_the_same_numbers():
    skipping = _training.skipping(settings(), seed=0).transform()
    first, second = losses_and_accuracies(settings(), skipping, skipping)
    assert first == second


def test_accuracy_is_that_of_all_test_images():
    # 360 images cannot be dealt to 7 workers, so some of them get images that do not count.
    chosen = settings(num_workers=7, num_steps=40, batch_size=16)
    ((losses, accuracies),) = losses_and_accuracies(chosen, _training.full_reduction())
    for accuracy in accuracies:
        assert accuracy * 360 == pytest.approx(round(accuracy * 360))
    assert accuracies[-1] > 0.85
    assert losses[-1] < losses[0]


def test_other_modes_and_options():
    options = ("--mode", "dropout", "--normalize", "drop", "--optimizer", "sgd", "--partition", "by-class")
    code, output = run(*SHORT, *options, "--workers", "3", "--json", "figures.json", "--plot", "curves.png")
    assert code == 0, output
    figures = json.loads(Path("figures.json").read_text())
    assert figures["share_of_bytes_saved"] == 0
    assert figures["share_of_gradient_left_out"] > 0
    assert figures["settings"]["learning_rate"] == _settings.DEFAULT_LEARNING_RATES["sgd"]
    assert Path("curves.png").stat().st_size > 10_000


def test_says_what_is_not_as_wanted():
    described = sr.describe({"kernel": jax.numpy.zeros((64, 64))}, 8, skip_ratio=0.01)
    devices = jax.devices("cpu")[:8]
    fewer, nothing = _report.notes(settings(skip_ratio=0.01), described, devices, 16)
    assert "JAX has 8 CPU devices, so there are 8 workers, not 16" in fewer
    assert "rounds to 0 steps, so nothing is skipped" in nothing
    assert _report.notes(settings(skip_ratio=0.0), described, devices, 8) == []


def test_a_training_that_diverges_is_reported(tmp_path):
    diverged = _training.Run(0, (2.3, float("inf"), float("nan")), (1, 2, 3), (0.1, 0.1, 0.1), 1.0)
    described = sr.describe({"kernel": jax.numpy.zeros((64, 64))}, 8)
    comparison = _report.Comparison(settings(num_steps=3), described, [diverged], [diverged])
    write_json(tmp_path / "figures", _report.as_json(comparison, jax.devices("cpu")))
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["skipping"]["final_training_loss"] is None
    assert figures["skipping"]["runs"][0]["curves"]["training_loss"] == [2.3, None, None]
    assert _report.table(comparison).row_count > 0
    _figure.save_figure(comparison, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (["--skip-ratio", "1"], "--skip-ratio", "1.0 is not in [0, 1)"),
        (["--skip-ratio", "-0.1"], "--skip-ratio", "not in [0, 1)"),
        (["--skip-ratio", "nan"], "--skip-ratio", "not in [0, 1)"),
        # typer words these itself, differently in each version.
        (["--workers", "1"], "--workers", ""),
        (["--steps", "0"], "--steps", ""),
        (["--seeds", "0"], "--seeds", ""),
        (["--learning-rate", "0"], "--learning-rate", "not a positive number"),
        (["--learning-rate", "inf"], "--learning-rate", "not a positive number"),
        (["--mode", "fast"], "--mode", "'random', 'static', 'dropout'"),
        (["--batch-size", "500"], "--batch-size", "each of 8 workers holds only 179"),
        (["--plot", "curves.txt"], "--plot", "ends in .png"),
        (["--plot", "nowhere/curves.png"], "--plot", "there is no folder"),
        (["--json", "nowhere/figures.json"], "--json", "there is no folder"),
        (["--data-dir", "."], "--data-dir", "is for --data fashion-mnist"),
        (["--data", "fashion-mnist", "--data-dir", "."], "--data-dir", "apt-get install dataset-fashion-mnist"),
    ],
)
def test_refuses_wrong_options(arguments, option, message):
    code, output = run(*arguments)
    assert code == 2
    assert option in output
    assert message in output


def test_without_a_subcommand_there_is_help():
    result = CliRunner().invoke(make_app(), [], env={"COLUMNS": "120"})
    assert "demo" in result.output
    assert "Usage" in result.output


def started(code, **environment):
    """A new Python that runs `code`."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("NPROC", "XLA_FLAGS")}
    command = [sys.executable, "-W", "error", "-c", code]
    return subprocess.run(command, env=inherited | environment, capture_output=True, text=True, timeout=50)


@pytest.mark.parametrize("missing", ["typer", "sklearn"])
def test_names_the_extra_that_is_missing(missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['skipreduce', 'demo', '--steps', '1']; "
        "from jax_skipreduce.__main__ import main; main()"
    )
    result = started(code)
    assert result.returncode == 1
    assert "pip install 'jax-skipreduce[demo]'" in result.stderr
    assert f"needs {missing}," in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_library_imports_none_of_the_extra():
    code = (
        "import sys, jax_skipreduce, jax_skipreduce.__main__; "
        "print([name for name in ('typer', 'rich', 'matplotlib', 'flax', 'sklearn') if name in sys.modules])"
    )
    result = started(code)
    assert result.stdout.strip() == "[]", result.stderr


def test_sets_up_its_own_workers(tmp_path):
    code = (
        "import sys; sys.argv = ['skipreduce', 'demo', '--steps', '2', '--workers', '3', '--json', 'figures.json']; "
        "from jax_skipreduce.__main__ import main; main()"
    )
    result = started(code, JAX_PLATFORMS="cpu")
    assert result.returncode == 0, result.stderr
    assert json.loads(Path("figures.json").read_text())["devices"]["num_devices"] == 3


def test_keeps_the_number_of_devices_that_the_user_set():
    code = (
        "import os, jax; from jax_skipreduce.programs.common.devices import find_workers; "
        "print(len(find_workers(8)), jax.device_count(), os.environ['NPROC'])"
    )
    result = started(code, JAX_PLATFORMS="cpu", NPROC="7", XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert result.stdout.split() == ["4", "4", "7"], result.stderr
    result = started(code, JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES="1")
    assert "RuntimeError: JAX has one CPU device" in result.stderr
