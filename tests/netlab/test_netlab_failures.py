"""A link that is cut while workers train over it: each worker on either side ends by itself, with a message."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from jax_skipreduce import netlab

pytestmark = pytest.mark.netlab

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 200

# In each namespace: runs the worker, cuts the link of the victim, and writes down how the worker ended. Returns 0,
# because the lab ends all when one fails.
WATCH = """
import json, os, pathlib, subprocess, sys, time
folder, victim = pathlib.Path(sys.argv[1]), sys.argv[2]
rank, num_workers = os.environ["SKIPREDUCE_LAB_RANK"], os.environ["SKIPREDUCE_LAB_NUM_WORKERS"]
command = [sys.executable, "-m", "tests.multiprocess.failing_worker", os.environ["SKIPREDUCE_LAB_COORDINATOR"],
           num_workers, rank, "--heartbeat", "10", "--ready", str(folder / f"ready{rank}")]
with open(folder / f"output{rank}", "w") as output:
    worker = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
while rank == victim and not all((folder / f"ready{other}").exists() for other in range(int(num_workers))):
    time.sleep(0.05)
if rank == victim:
    subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
    (folder / "cut").touch()
status = worker.wait()
(folder / f"ended{rank}").write_text(json.dumps(status))
"""


@pytest.fixture(autouse=True)
def _needs_a_lab():
    if (reason := netlab.unavailable()) is not None:
        pytest.skip(reason)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_link_that_is_cut(victim, tmp_path):
    command = [sys.executable, "-c", WATCH, str(tmp_path), str(victim)]
    env = {"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}
    status = netlab.run(command, num_workers=3, rate="500mbit", env=env, timeout_s=PATIENCE_S)
    assert status == 0  # the time was not over
    cut_at = (tmp_path / "cut").stat().st_mtime
    for rank in range(3):
        ended = tmp_path / f"ended{rank}"
        code, output = json.loads(ended.read_text()), (tmp_path / f"output{rank}").read_text(errors="replace")
        print(f"worker {rank} ended with {code} after {ended.stat().st_mtime - cut_at:.1f} s")
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
