"""A link that is cut while workers train over it: each worker on either side ends by itself, with a message."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jax_skipreduce import netlab

pytestmark = pytest.mark.netlab

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 200

# In each namespace: runs the worker, writes down how it ended, and ends with 0, as the lab ends all when one fails.
WATCH = """
import json, os, pathlib, subprocess, sys
folder, rank = pathlib.Path(sys.argv[1]), os.environ["SKIPREDUCE_LAB_RANK"]
names = subprocess.run(["ip", "netns", "identify"], capture_output=True, text=True, check=True).stdout.split()
(folder / f"namespace{rank}").write_text(names[0])
command = [sys.executable, "-m", "tests.multiprocess.failing_worker", os.environ["SKIPREDUCE_LAB_COORDINATOR"],
           os.environ["SKIPREDUCE_LAB_NUM_WORKERS"], rank, "--heartbeat", "10", "--ready", str(folder / f"ready{rank}")]
worker = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
partial = folder / f"partial{rank}"
partial.write_text(json.dumps([worker.returncode, worker.stdout]))
partial.rename(folder / f"ended{rank}")
"""


@pytest.fixture(autouse=True)
def _needs_a_lab():
    if (reason := netlab.unavailable()) is not None:
        pytest.skip(reason)


def wait_for(paths):
    deadline = time.monotonic() + PATIENCE_S
    while missing := [path.name for path in paths if not path.exists()]:
        assert time.monotonic() < deadline, f"{missing} did not come"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_link_that_is_cut(victim, tmp_path):
    cut_at = []
    command = [sys.executable, "-c", WATCH, str(tmp_path)]
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}

    # A lab is made by the main thread (it holds signals back), so the cut comes from another.
    def cut():
        wait_for([tmp_path / f"ready{rank}" for rank in range(3)])
        namespace = (tmp_path / f"namespace{victim}").read_text()
        subprocess.run(["ip", "-n", namespace, "link", "set", "eth0", "down"], check=True)
        cut_at.append(time.time())

    cutter = threading.Thread(target=cut)
    cutter.start()
    status = netlab.run(command, num_workers=3, rate="500mbit", env=env, timeout_s=PATIENCE_S)
    cutter.join()
    assert status == 0  # the time was not over
    assert cut_at
    for rank in range(3):
        ended = tmp_path / f"ended{rank}"
        code, output = json.loads(ended.read_text())
        print(f"worker {rank} ended with {code} after {ended.stat().st_mtime - cut_at[0]:.1f} s")
        assert code == -6, output  # SIGABRT
        assert "JAX distributed service detected fatal errors" in output
        if rank == 0:
            # It has the list of those that it does not hear of.
            missing = "[12]" if victim == 0 else "1"
            assert re.search(rf"stopped sending heartbeats\):\s+{missing}\b", output), output
        elif victim in (0, rank):
            # Cut off from worker 0, which gives no answer.
            assert "CoordinationService/Heartbeat" in output, output
        else:
            assert re.search(r"stopped sending heartbeats\):\s+1\b", output), output
