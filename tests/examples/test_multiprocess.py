"""examples/multiprocess.py: several processes over Gloo, and what its launcher does when one of them dies."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers import slow

pytestmark = pytest.mark.multiprocess

# Processes compete for few cores while other tests run, and importing JAX takes most of the time.
PATIENCE_S = 100


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def start(example_path, tmp_path):
    """Starts the example; whatever it leaves over is killed, so that a failure does not go on for ever."""
    started = []

    def start(*options: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-W", "error", str(example_path("multiprocess")), *options]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, cwd=tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Output up to the line that contains `text`."""
    output = ""
    assert process.stdout is not None
    for line in process.stdout:
        output += line
        if text in line:
            return output
    pytest.fail(f"no {text!r} in {output}, {process.communicate()[1]}")


def worker_pids(output: str) -> list[int]:
    return [int(pid) for pid in re.findall(r"worker \d+ is process (\d+)", output)]


@pytest.mark.parametrize("num_processes", [2, slow(3)])
def test_learns_and_all_processes_agree(start, num_processes):
    process = start("--processes", str(num_processes), "--steps", "60", "--time-limit", str(PATIENCE_S))
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, errors
    assert f"parameters are bitwise the same on all {num_processes} processes" in output
    (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", output)
    assert float(accuracy) > 90
    assert not any(map(is_alive, worker_pids(output)))


@pytest.mark.parametrize("victim", [slow(0), 1])
def test_a_worker_that_dies_ends_the_run(start, victim):
    process = start("--steps", "1000000", "--time-limit", str(PATIENCE_S))
    pids = worker_pids(read_until(process, "step   50"))
    os.kill(pids[victim], signal.SIGKILL)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - begin < 30
    # The other worker may notice first that its peer is gone, and fail with a code of its own.
    assert process.returncode > 0
    assert "ending the others" in errors
    assert not any(map(is_alive, pids))


def test_passes_on_the_exit_code(start):
    process = start("--skip-ratio", "2", "--time-limit", str(PATIENCE_S))
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "ValueError: skip_ratio=2.0" in errors
    assert not any(map(is_alive, worker_pids(output)))


@pytest.mark.slow
def test_a_worker_that_hangs_is_ended_by_the_time_limit(start):
    process = start("--steps", "1000000", "--time-limit", "8")
    pids = worker_pids(read_until(process, "worker 1"))
    os.kill(pids[1], signal.SIGSTOP)
    process.communicate(timeout=30)
    assert process.returncode == 124
    assert not any(map(is_alive, pids))


def test_ends_its_workers_when_it_is_ended(start):
    process = start("--steps", "1000000", "--time-limit", str(PATIENCE_S))
    pids = worker_pids(read_until(process, "worker 1"))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert len(pids) == 2
    assert not any(map(is_alive, pids))
