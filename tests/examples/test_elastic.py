"""examples/elastic.py: goes on with the workers that are left, from the last checkpoint."""

import contextlib
import os
import re
import signal
import subprocess
import sys

import pytest

from tests.examples.test_multiprocess import is_alive, read_until, worker_pids

pytestmark = pytest.mark.multiprocess

PATIENCE_S = 200


@pytest.fixture
def start(example_path, tmp_path):
    """Starts the example; whatever it leaves over is killed."""
    started = []

    def start(*options: str) -> subprocess.Popen[str]:
        options = ("--checkpoints", str(tmp_path / "checkpoints"), *options)
        command = [sys.executable, str(example_path("elastic")), *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, cwd=tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def finish(process: subprocess.Popen[str]) -> str:
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output + errors
    return output


@pytest.mark.slow
def test_goes_on_with_fewer_and_then_with_more(start):
    process = start("--processes", "3", "--steps", "200", "--save-every", "10")
    pids = worker_pids(read_until(process, "step   50"))
    os.kill(pids[0], signal.SIGKILL)  # the one that the others of jax.distributed report to
    output = finish(process)

    steps = [int(step) for step in re.findall(r"from step (\d+), workers: 2", output)]
    assert len(steps) == 1
    assert steps[0] % 10 == 0
    assert 30 <= steps[0] < 200
    assert re.search(r"done after step 200, test accuracy ([89]\d|100)\.", output)

    more = finish(start("--processes", "3", "--steps", "210"))
    assert "from step 200, workers: 3" in more
    assert re.search(r"done after step 210, test accuracy (9\d|100)\.", more)
    assert not any(map(is_alive, pids + worker_pids(output) + worker_pids(more)))


def test_goes_on_without_a_worker_that_hangs(start):
    process = start("--processes", "2", "--steps", "120", "--save-every", "10")
    pids = worker_pids(read_until(process, "step   50"))
    os.kill(pids[1], signal.SIGSTOP)
    output = finish(process)
    assert re.search(r"from step \d+, workers: 1", output)
    assert "done after step 120" in output
    assert not any(map(is_alive, pids))


def test_a_mistake_is_not_tried_again(start):
    process = start("--processes", "2", "--skip-ratio", "2")
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode != 0
    assert "ValueError: skip_ratio=2.0" in errors
    assert "not restarted" in errors
    assert len(worker_pids(output)) == 2
