"""Time to the target, speed-up, break-down: the arithmetic, on curves that are made up."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from jax_skipreduce.programs.common.records import finite
from jax_skipreduce.programs.tta import _figures, _records, _report, _results
from jax_skipreduce.programs.tta._breakdown import break_down
from jax_skipreduce.programs.tta._records import Evaluation, Measurement, Run, Timings
from tests.tta.settings import make_settings


@pytest.mark.parametrize(
    ("accuracies", "target", "expected"),
    [
        ([0.1, 0.2, 0.3], 0.9, None),
        ([0.9, 0.9, 0.9], 0.5, 10.0),
        ([0.5, 0.5], 0.5, 10.0),
        # Smoothed: 0.2, 0.3, 0.4, 0.6.
        ([0.2, 0.4, 0.6, 0.8], 0.3, 20.0),
        ([0.2, 0.4, 0.6, 0.8], 0.35, 25.0),
        ([0.2, 0.4, 0.6, 0.8], 0.5, 35.0),
        ([0.2, 0.4, 0.6, 0.8], 0.6, 40.0),
        ([0.2, 0.4, 0.6, 0.8], 0.61, None),
        # One lucky evaluation does not reach it.
        ([0.2, 0.2, 0.5, 0.2, 0.2], 0.45, None),
        # A diverged training has no accuracy to speak of, but a number.
        ([float("nan")] * 3, 0.1, None),
    ],
)
def test_time_to_target(accuracies, target, expected):
    seconds = [10.0 * (i + 1) for i in range(len(accuracies))]
    found = _results.time_to_target(seconds, accuracies, target)
    assert found == (expected if expected is None else pytest.approx(expected))


def make_run(method, seed, seconds_per_step, accuracies):
    evaluations = tuple(
        Evaluation(10 * (i + 1), 10 * (i + 1) * seconds_per_step, accuracy, 1.0 - accuracy, 1.0)
        for i, accuracy in enumerate(accuracies)
    )
    steps = (seconds_per_step,) * (10 * len(accuracies))
    return Run(method, seed, 0, steps, evaluations, "a", "b", "c")


TIMINGS = Timings(
    compute=(0.10, 0.12, 0.11),
    step={"psum": (1.0, 1.2, 1.1), "skip-50": (0.8, 0.9, 0.7)},
    local={"psum": (0.12, 0.12, 0.12), "skip-50": (0.14, 0.13, 0.15)},
)


@pytest.fixture
def measurement(tmp_path):
    runs = [
        make_run("skip-50", 0, 0.5, [0.2, 0.4, 0.6, 0.8]),
        make_run("psum", 0, 1.0, [0.2, 0.4, 0.6, 0.8]),
        make_run("psum", 1, 1.0, [0.4, 0.4, 0.4, 0.4]),
        make_run("skip-50", 1, 0.4, [0.1, 0.1, 0.1, 0.1]),
        make_run("skip-75", 0, 0.25, [0.2, 0.4, 0.6, 0.8]),
        make_run("skip-75", 1, 0.2, [0.4, 0.4, 0.4, 0.4]),
    ]
    header = _records.make_header(make_settings(tmp_path, rate="200mbit"), num_parameters=1000)
    return Measurement(header, runs, TIMINGS)


def test_speedups_are_paired_by_seed(measurement):
    results = _results.evaluate(measurement, 0.35, ("skip-75",))
    psum, skip_75, skip_50 = results.summaries
    assert [summary.method for summary in results.summaries] == ["psum", "skip-75", "skip-50"]
    assert [outcome.speedup for outcome in psum.outcomes] == [1.0, 1.0]
    assert [outcome.speedup for outcome in skip_75.outcomes] == pytest.approx([4.0, 5.0])
    assert skip_75.speedup == pytest.approx(4.5)
    first, second = skip_50.outcomes
    assert (first.seed, first.seconds_to_target, first.speedup) == (0, pytest.approx(12.5), pytest.approx(2.0))
    assert (second.seed, second.seconds_to_target, second.speedup) == (1, None, None)
    # Of the seeds that reached it, it would look good.
    assert skip_50.speedup is None
    assert skip_50.p50_seconds == pytest.approx(0.45)


def test_final_accuracy(measurement):
    results = _results.evaluate(measurement, 0.35)
    psum = results.summaries[0]
    assert psum.accuracy == pytest.approx((0.5 + 0.4) / 2)
    assert psum.spread == pytest.approx(0.1 / 2**0.5)
    one = dataclasses.replace(measurement, runs=measurement.runs[:2])
    assert _results.evaluate(one, 0.35).summaries[0].spread is None
    # The last five of many.
    long = dataclasses.replace(measurement, runs=[make_run("psum", 0, 1.0, [0.0] * 7 + [0.5] * 5)])
    assert _results.evaluate(long, 0.35).summaries[0].accuracy == pytest.approx(0.5)


def test_without_the_baseline_there_is_no_speedup(measurement):
    runs = [run for run in measurement.runs if run.method != "psum"]
    results = _results.evaluate(dataclasses.replace(measurement, runs=runs), 0.35)
    assert [summary.speedup for summary in results.summaries] == [None, None]


def test_parts_add_up_to_the_step():
    parts = break_down(TIMINGS)
    assert parts["psum"].compute == parts["skip-50"].compute == pytest.approx(0.11)
    assert parts["psum"].overhead == pytest.approx(0.01)
    assert parts["psum"].communication == pytest.approx(0.98)
    assert parts["psum"].step == pytest.approx(1.1)
    assert parts["psum"].share_of_communication == pytest.approx(0.98 / 1.1)
    assert parts["skip-50"].overhead == pytest.approx(0.03)
    assert parts["skip-50"].communication == pytest.approx(0.66)


def shown(results):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(_report.table(results))
    console.print(_report.breakdown_table(results))
    return console.export_text() + "\n".join(_report.remarks(results))


def test_the_table_shows_every_run(measurement):
    text = shown(_results.evaluate(measurement, 0.35))
    assert "not reached" in text
    assert "Did not reach the target of 35.0%: skip-50 (seed 1)" in text
    assert "4.50x" in text
    assert "45.0 +- 7.1 %" in text
    assert "89%" in text
    assert "share its memory" not in text
    no_lab = dataclasses.replace(measurement, header=dict(measurement.header, settings=no_lab_settings(measurement)))
    assert "Times say nothing about slow links" in shown(_results.evaluate(no_lab, 0.35))


def no_lab_settings(measurement):
    return dict(measurement.header["settings"], rate=None)


def test_json_has_everything(measurement):
    report = json.loads(json.dumps(finite(_results.as_json(_results.evaluate(measurement, 0.35)))))
    assert report["methods"]["skip-50"]["seeds"][1]["seconds_to_target"] is None
    assert report["methods"]["skip-75"]["median_speedup"] == pytest.approx(4.5)
    assert report["breakdown"]["psum"]["share_of_communication"] == pytest.approx(0.98 / 1.1)
    assert len(report["runs"]) == 6
    assert report["runs"][0]["evaluations"][3]["accuracy"] == 0.8
    assert report["settings"]["rate"] == "200mbit"
    assert {"jax", "jax_skipreduce"} <= set(report["versions"])
    assert report["gradient_bytes"] == 4000


@pytest.mark.parametrize("has_timings", [True, False])
def test_pictures(measurement, tmp_path, has_timings):
    if not has_timings:
        measurement = dataclasses.replace(measurement, timings=None)
    paths = _figures.save_figures(_results.evaluate(measurement, 0.35), tmp_path / "new")
    names = ["vgg-200mbit-accuracy.png", "vgg-200mbit-speedup.png", "vgg-200mbit-breakdown.png"]
    assert [path.name for path in paths] == names[: 3 if has_timings else 2]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5_000


def test_pictures_where_nothing_is_reached(measurement, tmp_path):
    assert len(_figures.save_figures(_results.evaluate(measurement, 0.99), tmp_path)) == 3
