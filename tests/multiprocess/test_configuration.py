"""Processes that were started with other settings end, and say which."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest

from jax_skipreduce._configuration import fingerprint, first_difference
from jax_skipreduce._reduction import Config
from tests.multiprocess.test_gloo import free_port

ROOT = Path(__file__).parent.parent.parent

DIFFERENCES = {
    "seed": r"seed is",
    "ratio": r"gradient 'w' is float32\[2000\], skipped, skip_ratio",
    "schedule": r"gradient 'w' is float32\[2000\], skipped, skip_ratio \[0.0, ",
    "protect": r"gradient 'w' is float32\[2000\], (skipped|protected)",
    "tree": r"gradient 'w' is float32\[(2000|3000)\]",
}


def run_two(what):
    """Return codes and output of both processes."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multiprocess.differing_worker", str(port), str(rank), what],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 100
        while all(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        if any(worker.returncode for worker in workers):
            # What a launcher does: one has failed, so the others are ended.
            for worker in workers:
                worker.terminate()
        return [(worker.communicate(timeout=100)[0], worker.returncode) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_named_by_one_process_at_least(what):
    (first, code), (second, other_code) = run_two(what)
    assert code != 0
    assert other_code != 0
    both = first + second
    assert "done" not in both
    line = next(text for text in both.splitlines() if text.startswith("ValueError: processes "))
    assert re.search(rf"processes \d and \d do not do the same: {DIFFERENCES[what]}", line), line


@pytest.mark.multiprocess
def test_the_same_settings_are_fine():
    assert [(output.splitlines()[-1], code) for output, code in run_two("nothing")] == [("done", 0)] * 2


def test_fingerprints():
    grads = {"w": jnp.zeros(2000), "b": jnp.zeros(3)}
    one = fingerprint(Config("data", lambda count: 0.5), grads)
    assert one == fingerprint(Config("data", lambda count: 0.25 + 0.25), grads)
    assert first_difference(one, one) is None
    assert "gradient 'b' is float32[3], small" in str(first_difference(one, {**one, "gradient 'b'": "?"}))
    assert first_difference(one, {k: v for k, v in one.items() if k != "seed"}) == (
        "seed is 0 on the first and none on the second"
    )
    assert first_difference({}, {"more": "1"}) == "more is none on the first and 1 on the second"
