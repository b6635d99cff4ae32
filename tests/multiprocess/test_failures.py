"""What a failing worker does to the others: each ends by itself, with a message, within the limits that were set.

docs/failures.md has the table of it. Limits are 5 or 10 seconds here and `PATIENCE_S` is far longer, for machines that
are busy; but shorter than JAX's own defaults (100 s and more), so a limit that has no effect fails a test.
``pytest -n 0 -rP -m ''`` on this file prints how long each worker took to end.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import slow
from tests.multiprocess.test_gloo import free_port

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 80


class Workers:
    """Processes of failing_worker.py that train together."""

    def __init__(self, folder: Path, num_processes: int, *options: str, xla_flags: str = ""):
        self.folder, self.coordinator = folder, f"127.0.0.1:{free_port()}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", "XLA_FLAGS": xla_flags}
        self.processes = []
        self.training_since = time.monotonic()
        for rank in range(num_processes):
            own = ["--ready", str(folder / f"ready{rank}"), "--out", str(folder / f"out{rank}.npz")]
            command = [sys.executable, "-m", "tests.multiprocess.failing_worker", self.coordinator]
            command += [str(num_processes), str(rank), *own, *options]
            with (folder / f"output{rank}").open("w") as output:
                process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
            self.processes.append(process)

    def output(self, rank: int) -> str:
        return (self.folder / f"output{rank}").read_text()

    def wait_until_training(self) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while not all((self.folder / f"ready{rank}").exists() for rank in range(len(self.processes))):
            assert time.monotonic() < deadline, self.output(0)
            assert all(process.poll() is None for process in self.processes), self.output(0)
            time.sleep(0.05)
        self.training_since = time.monotonic()

    def wait(self, rank: int) -> tuple[int, str]:
        """Exit code and output of a worker, which ends by itself."""
        try:
            code = self.processes[rank].wait(PATIENCE_S)
            print(f"worker {rank} ended with {code} after {time.monotonic() - self.training_since:.1f} s")
            return code, self.output(rank)
        except subprocess.TimeoutExpired:
            pytest.fail(f"worker {rank} hangs:\n{self.output(rank)}")

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path):
    started = []

    def start(*args, **settings) -> Workers:
        started.append(Workers(tmp_path, *args, **settings))
        return started[-1]

    yield start
    for workers in started:
        workers.end()


@pytest.mark.parametrize(
    ("victim", "signum", "message"),
    [
        # Gloo's connections are reset, and an exception ends the step at once; the exit waits for the heartbeats.
        (1, signal.SIGKILL, "Task 1 heartbeat timeout"),
        # It was the coordinator: its connection is gone, and JAX ends the others at once.
        slow(0, signal.SIGKILL, "the leader task was preempted/died/restarted unexpectedly"),
        # Its connections stay open, so nobody but the heartbeats can tell.
        slow(1, signal.SIGSTOP, "unhealthy (stopped sending heartbeats):\n1"),
        slow(0, signal.SIGSTOP, "RPC: /xla.coordination.CoordinationService/Heartbeat"),
    ],
    ids=["kill-1", "kill-0", "stop-1", "stop-0"],
)
def test_a_worker_that_is_killed_or_stopped(start, victim, signum, message):
    workers = start(3, "--heartbeat", "10")
    workers.wait_until_training()
    os.kill(workers.processes[victim].pid, signum)
    for rank in {0, 1, 2} - {victim}:
        code, output = workers.wait(rank)
        assert code == -signal.SIGABRT, output
        assert "Terminating process because the JAX distributed service detected fatal errors" in output
        assert message in output


@pytest.mark.slow
def test_a_worker_that_hangs_and_the_time_limit_of_gloo(start):
    """It goes on sending heartbeats. Gloo's own limit ends the wait, and the shutdown barrier says who is missing."""
    workers = start(3, "--hangs", "1", "--shutdown", "5", xla_flags="--xla_cpu_collective_timeout_seconds=5")
    workers.wait_until_training()
    for rank in (0, 2):
        code, output = workers.wait(rank)
        assert code != 0
        assert "Timed out waiting 5000ms" in output
    assert "task names:\n1\n" in workers.output(0) + workers.output(2)
    # JAX ends the one that hangs, too.
    assert workers.wait(1)[0] == -signal.SIGABRT


def test_a_worker_that_hangs_and_time_limit(start):
    """Without any setting of JAX's, and each says where it is."""
    workers = start(3, "--hangs", "1", "--time-limit", "5")
    workers.wait_until_training()
    codes, outputs = zip(*(workers.wait(rank) for rank in range(3)), strict=True)
    assert "worker 1, step 5 was not done after 5 s" in outputs[1]
    assert "in next_batch" in outputs[1]
    # Who ends first takes the others along, if it is worker 0: JAX aborts them.
    assert set(codes) <= {124, -signal.SIGABRT}
    assert 124 in codes
    for output in outputs:
        if "was not done after" not in output:
            assert "JAX distributed service detected fatal errors" in output
    assert not any("in next_batch" in outputs[rank] for rank in (0, 2))


@pytest.mark.slow
def test_a_worker_that_raises(start):
    """Python's exit waits for the others in the shutdown barrier of JAX, and they wait for it in their step."""
    workers = start(3, "--raises", "1", "--shutdown", "5")
    workers.wait_until_training()
    code, output = workers.wait(1)
    assert code != 0
    assert "OSError: no more data" in output
    for rank in (0, 2):
        code, output = workers.wait(rank)
        assert code == -signal.SIGABRT, output
        assert "Shutdown barrier" in output
        assert "# of tasks that reached the barrier: 1/3.\nThe first task at the barrier: 1." in output


def test_sigterm_does_not_end_a_worker(start):
    """JAX catches it, for programs that ask whether they are to save a last checkpoint. So launchers have to kill."""
    workers = start(1)
    workers.wait_until_training()
    workers.processes[0].terminate()
    deadline = time.monotonic() + PATIENCE_S
    while "SIGTERM caught" not in workers.output(0):
        assert time.monotonic() < deadline, workers.output(0)
        time.sleep(0.05)
    with pytest.raises(subprocess.TimeoutExpired):
        workers.processes[0].wait(1)


def test_nan_on_one_worker_reaches_all(start):
    workers = start(2, "--nan", "1")
    for rank in range(2):
        code, output = workers.wait(rank)
        assert code == 1, output
        assert f"worker {rank}: the loss is nan in step 5" in output


def test_nan_on_one_worker_and_apply_if_finite(start):
    workers = start(2, "--nan", "1", "--if-finite", "--steps", "12")
    results = []
    for rank in range(2):
        code, output = workers.wait(rank)
        assert code == 0, output
        results.append(dict(np.load(workers.folder / f"out{rank}.npz")))
    assert [result["skipped"] for result in results] == [1, 1]
    assert np.isfinite(results[0]["params"]).all()
    np.testing.assert_array_equal(results[0]["params"], results[1]["params"])
