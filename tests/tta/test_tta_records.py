"""The file of results: what is written is read, and a measurement that was stopped goes on."""

import json
import math

import pytest

from jax_skipreduce.programs.tta import _records
from jax_skipreduce.programs.tta._records import Evaluation, Run, Timings
from jax_skipreduce.programs.tta._settings import Settings
from tests.tta.settings import make_settings

RUN = Run("psum", 0, 1, (0.5, 0.25), (Evaluation(2, 0.75, 0.5, 1.5, 2.0),), "00aa", "00bb", "00cc")
TIMINGS = Timings((1.0, 2.0), {"psum": (3.0, 4.0)}, {"psum": (1.0, 1.5)})


@pytest.fixture
def settings(tmp_path):
    return make_settings(tmp_path)


def write(settings, *records):
    header = _records.make_header(settings, 10)
    runs = _records.open_file(settings.path, settings, header)
    for record in records:
        _records.append(settings.path, _records.as_line(record))
    return runs


def test_settings_travel_as_text(settings):
    assert Settings.from_json(settings.to_json()) == settings


def test_what_is_written_is_read(settings):
    assert write(settings, RUN, TIMINGS) == []
    measurement = _records.read(settings.path)
    assert measurement.runs == [RUN]
    assert measurement.timings == TIMINGS
    assert measurement.settings == settings
    assert measurement.header["gradient_bytes"] == 40


def test_a_run_that_diverged(settings):
    write(settings, Run("psum", 0, 0, (0.5,), (Evaluation(1, 0.5, 0.1, math.nan, math.inf),), "a", "b", "c"))
    (run,) = _records.read(settings.path).runs
    assert math.isnan(run.evaluations[0].loss)
    assert run.evaluations[0].accuracy == 0.1


def test_resuming_keeps_runs_and_drops_a_line_that_was_cut_off(settings, tmp_path):
    write(settings, RUN)
    with settings.path.open("a") as file:
        file.write('{"kind": "run", "method": "sk')
    again = make_settings(tmp_path, resume=True, methods=("psum", "skip-75"), seeds=(0, 1))
    assert write(again, TIMINGS) == [RUN]
    measurement = _records.read(settings.path)
    assert (measurement.runs, measurement.timings) == ([RUN], TIMINGS)
    assert len(settings.path.read_text().splitlines()) == 3


def test_starting_anew_keeps_the_old_file(settings, tmp_path):
    for _ in range(3):
        write(settings, RUN)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs.jsonl", "runs.jsonl.1", "runs.jsonl.2"]
    assert _records.read(tmp_path / "runs.jsonl.2").runs == [RUN]


def test_runs_of_other_settings_are_not_mixed(settings, tmp_path):
    write(settings, RUN)
    other = make_settings(tmp_path, resume=True, batch_size=16)
    with pytest.raises(ValueError, match="batch_size=8, not 16"):
        write(other)
    assert _records.read(settings.path).runs == [RUN]
    # Another target judges the same runs.
    _records.check_resumable(settings.path, make_settings(tmp_path, resume=True, target=0.9))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "no line says what was measured"),
        ("hello\n", "not one JSON object per line"),
        ('{"kind": "cake"}\n', "a line that is no result"),
        ('{"kind": "run", "method": "psum"}\n', "a line that is no result"),
        ("[1]\n", "a line that is no result"),
    ],
)
def test_refuses_other_files(tmp_path, content, message):
    path = tmp_path / "runs.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as raised:
        _records.read(path)
    assert str(path) in str(raised.value)


def test_lines_are_json_that_others_read(settings):
    write(settings, RUN, TIMINGS)
    kinds = [json.loads(line)["kind"] for line in settings.path.read_text().splitlines()]
    assert kinds == ["header", "run", "timings"]
