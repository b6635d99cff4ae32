"""Tests of bits, run as XLA optimizes by default, which is what users get. conftest.py turns that off elsewhere.

Each runs pytest in a process of its own, for XLA reads its flags once.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HASHES, KERNELS = "tests/test_same_bits.py", "tests/native/test_cpu_all_reduce.py"
SLOW, NATIVE = pytest.mark.slow, pytest.mark.native


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        pytest.param([HASHES, "-k", "skipreduce and half or stacked"], 2, id="few hashes"),
        pytest.param([KERNELS, "-k", "of_the_ring and -skip-float32-bf"], 2, id="few kernels", marks=NATIVE),
        # Those two stand for these.
        pytest.param([HASHES], 20, id="hashes", marks=SLOW),
        pytest.param([KERNELS], 100, id="kernels", marks=[SLOW, NATIVE]),
        pytest.param(["tests/test_collectives.py", "-k", "bit or psum or pmean or mega or shape"], 60, marks=SLOW),
        pytest.param(["tests/test_wire_dtype.py", "tests/test_hierarchy.py"], 50, marks=SLOW),
        pytest.param(["tests/test_buckets.py", "-k", "large_leaves or in_full"], 12, marks=SLOW),
        pytest.param(["tests/test_fsdp.py", "-k", "bit or chain or slices"], 20, marks=SLOW),
    ],
)
def test_bits_as_xla_optimizes(arguments, least):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "XLA_FLAGS": ""}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1000)
    assert result.returncode == 0, result.stdout + result.stderr
    # No name that is no longer there leaves out a test.
    assert int(re.search(r"(\d+) passed", result.stdout)[1]) >= least, result.stdout
