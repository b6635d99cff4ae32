"""The CPU handler's own code under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers import slow

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "xla_ffi" / name for name in ("meeting.cc", "completions.cc", "cpu_reduce.cc")]


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("sanitizers", ["thread", slow("address,undefined")])
def test_meetings(sanitizers, tmp_path):
    program = tmp_path / "meeting_stress"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    subprocess.run(
        [
            "g++",
            *flags,
            f"-I{ROOT / 'xla_ffi'}",
            Path(__file__).with_name("meeting_stress.cc"),
            *SOURCES,
            "-o",
            program,
        ],
        check=True,
        timeout=300,
    )
    # Threads that wait for work for ever are no leak.
    command = [str(program)]
    if sanitizers == "thread" and shutil.which("setarch"):
        command = ["setarch", "-R", *command]  # ThreadSanitizer cannot live with all layouts of the address space
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stdout + result.stderr
