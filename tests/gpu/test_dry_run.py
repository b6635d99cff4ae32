"""The way that tests/gpu/check.sh takes, as far as it can be taken without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).with_name("check.sh")


@pytest.mark.multiprocess
def test_dry_run(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable}
    command = [str(CHECK), "--dry-run", "--out", str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert run.returncode == 0, run.stdout + run.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {part["part"]: part["result"] for part in results["parts"]} == {
        "environment": "PASS",
        "build": "NOT RUN",
        "load": "NOT RUN",
        "sanitizer": "NOT RUN",
        "time_limit": "NOT RUN",
        "correct_2_xla": "PASS",
        "timing_2": "PASS",
    }
    assert results["figures"]["correct_2_xla"][0]["checked"] == 5 * 2 * 2 * 2
    assert {row["what"] for row in results["figures"]["timing_2"]} == {"lax.psum", "ppermute k=0", "ppermute k=1"}


def test_arguments():
    unknown = subprocess.run([str(CHECK), "--nonsense"], capture_output=True, text=True)
    assert unknown.returncode == 2
    assert "unknown argument --nonsense" in unknown.stderr
    assert "--dry-run" in subprocess.run([str(CHECK), "--help"], capture_output=True, text=True).stdout
