"""`skipreduce tta`, as users call it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from jax_skipreduce import netlab
from jax_skipreduce.programs.tta import _settings
from jax_skipreduce.programs.tta._command import tta

pytestmark = pytest.mark.promotes

QUICK = ("--quick", "--data", "digits", "--json", "figures.json")


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    app = typer.Typer()
    app.command()(tta)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    # Rich frames error messages and breaks their lines.
    return result.exit_code, " ".join(result.output.replace("\u2502", " ").split())


def check_results(output, name):
    figures = json.loads(Path("figures.json").read_text())
    (measurement,) = figures["measurements"]
    assert list(measurement["methods"]) == ["psum", "skip-50", "skip-50-bf16"]
    assert {run["method"] for run in measurement["runs"]} == set(measurement["methods"])
    for one in measurement["runs"]:
        assert [e["step"] for e in one["evaluations"]] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert len({one["initial_checksum"] for one in measurement["runs"]}) == 1
    assert set(measurement["breakdown"]) == set(measurement["methods"])
    for kind in ("accuracy", "speedup", "breakdown"):
        assert Path("skipreduce-tta", f"{name}-{kind}.png").read_bytes().startswith(b"\x89PNG")
    for words in ("seconds to target", "exposed communication", "skip-50-bf16"):
        assert words in output
    return measurement


def test_quick_without_a_lab():
    code, output = run(*QUICK, "--no-lab")
    assert code == 0, output
    measurement = check_results(output, "vgg-no-lab")
    assert measurement["in_lab"] is False
    assert "Times say nothing about slow links" in output
    # Nothing is left to do.
    code, output = run(*QUICK, "--no-lab", "--resume", "--target", "0.99")
    assert code == 0, output
    assert "0 of 3 runs to make" in output
    assert "Did not reach the target of 99.0%: psum (seed 0), skip-50 (seed 0), skip-50-bf16 (seed 0)" in output
    code, output = run(*QUICK, "--no-lab", "--resume", "--steps", "50")
    assert code == 2
    assert "num_steps=40, not 50" in output


def test_quick_on_text_without_a_lab():
    Path("text").write_text("".join(f"{i} times {i} is {i * i}. " for i in range(900)))
    code, output = run("--quick", "--no-lab", "--workload", "lm", "--text", "text", "--steps", "6", "--rounds", "0")
    assert code == 0, output
    assert "lm, 4 workers, batches of 2 on each, devices of one process" in output
    assert not list(Path("skipreduce-tta").glob("*breakdown*"))


@pytest.mark.slow
@pytest.mark.netlab
@pytest.mark.skipif(netlab.unavailable() is not None, reason=str(netlab.unavailable()))
def test_quick_in_a_lab():
    # As from a shell: without the devices of this process.
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_", "PYTEST_"))}
    command = [sys.executable, "-m", "jax_skipreduce", "tta", *QUICK, "--rate", "500mbit"]
    result = subprocess.run(command, env=inherited | {"COLUMNS": "200"}, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout + result.stderr
    measurement = check_results(" ".join(result.stdout.split()), "vgg-500mbit")
    assert measurement["in_lab"] is True
    assert measurement["settings"]["num_workers"] == 4


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (["--workload", "resnet"], "--workload", "'resnet'; expected vgg, lm or all"),
        (["--methods", "psum,topk"], "--methods", "there is no method 'topk'; there are psum, psum-flat, psum-bf16"),
        (["--target", "85"], "--target", "85.0 is no accuracy in (0, 1)"),
        (["--target", "0.8"], "--target", "give one --workload"),
        (["--rate", "200mbit"], "--rate", "leave out one of --rate and --no-lab"),
        (["--json", "nowhere/figures.json"], "--json", "there is no folder"),
        (["--workload", "vgg", "--data-dir", "."], "--data", "apt-get install dataset-fashion-mnist"),
        (["--workload", "lm", "--text-dir", "."], "--text-dir", "apt-get download r-cran-janeaustenr"),
        (["--workload", "vgg", "--data", "digits", "--batch-size", "999"], "--batch-size", "batch_size=999: there are"),
        # typer words these itself, differently in each version.
        (["--workers", "1"], "--workers", ""),
        (["--seeds", "0"], "--seeds", ""),
        (["--text", "nowhere"], "--text", ""),
    ],
)
def test_refuses_wrong_options(arguments, option, message):
    code, output = run("--no-lab", *arguments)
    assert code == 2
    assert option in output
    assert message in output


def test_a_lab_that_cannot_be_made(monkeypatch):
    monkeypatch.setattr(netlab, "unavailable", lambda: "Only root may make network namespaces.")
    code, output = run("--quick", "--data", "digits")
    assert code == 2
    assert "Only root may make network namespaces. With --no-lab the workers are devices" in output


@pytest.mark.parametrize(
    ("rates", "message"),
    [(["--rate", "200mbps"], "write 200mbit for bits"), (["--rate", "1mbit,2mbit"], "2 rates for 4 workers")],
)
def test_wrong_rates(monkeypatch, rates, message):
    monkeypatch.setattr(netlab, "unavailable", lambda: None)
    code, output = run("--quick", "--data", "digits", "--rate", "1gbit", *rates)
    assert code == 2
    assert message in output


def test_workers_that_fail(monkeypatch):
    monkeypatch.setattr(netlab, "unavailable", lambda: None)
    calls = []

    def fail(command, **options):
        calls.append((command, options))
        return 3

    monkeypatch.setattr(netlab, "run", fail)
    code, output = run("--quick", "--data", "digits", "--rate", "1gbit", "--rate", "2gbit")
    assert code == 1
    assert "the workers of vgg-1gbit ended with exit status 3" in output
    assert "--resume" in output
    ((command, options),) = calls
    assert options == {"num_workers": 4, "rate": "1gbit"}
    settings = _settings.Settings.from_json(command[-1])
    assert command[:3] == [sys.executable, "-m", "jax_skipreduce.programs.tta"]
    assert (settings.rate, settings.methods) == ("1gbit", ("psum", "skip-50", "skip-50-bf16"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--no-lab"], "this is a worker of a lab"),
        (["--workers", "4", "--rate", "1gbit"], "the lab has its own number"),
        ([], "give once the rate"),
        (["--workload", "all", "--rate", "1gbit"], "one at a time"),
    ],
)
def test_inside_of_a_lab(monkeypatch, arguments, message):
    monkeypatch.setattr(netlab, "is_worker", lambda: True)
    code, output = run("--data", "digits", *arguments)
    assert code == 2
    assert message in output
