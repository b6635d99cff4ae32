"""`skipreduce bench` in two real processes over Gloo: one table, one set of files, one verdict."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess

ROOT = Path(__file__).parent.parent.parent

# Process 1 expects another value in each element.
EXPECTS_ANOTHER_SUM = """
import jax
from jax_skipreduce.programs.bench import _check
from jax_skipreduce.__main__ import main

count_wrong = _check.count_wrong
_check.count_wrong = lambda result, expected: count_wrong(result, expected + jax.process_index())
main()
"""


KNOWS_ANOTHER_METHOD = """
from jax_skipreduce.__main__ import main
from jax_skipreduce._transform.registry import register
from tests.seams.toys import HalvesMethod

register(HalvesMethod)
main()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def run_both(tmp_path, *options, program=("-m", "jax_skipreduce")):
    """Exit codes, outputs and errors of two processes."""
    address = f"127.0.0.1:{free_port()}"
    environment = {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-W", "error", *program, "bench", *options),
                *("--coordinator", address, "--num-processes", "2", "--process-id", str(rank)),
            ],
            cwd=tmp_path,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    codes = [process.returncode for process in processes]
    return codes, [(without_gloo(output), errors) for output, errors in outputs]


def without_gloo(output: str) -> str:
    """`output` without what Gloo itself says on stdout."""
    return "".join(line for line in output.splitlines(keepends=True) if not line.startswith("[Gloo]"))


def test_two_processes_print_one_table(tmp_path):
    options = ("--sizes", "4004,8K", "--rounds", "3", "--warmup", "1", "--json", "numbers.json", "--plot", "speed.png")
    codes, ((first, _), (second, _)) = run_both(tmp_path, *options)
    assert codes == [0, 0], (first, second)
    assert second == ""
    figures = json.loads((tmp_path / "numbers.json").read_text())
    rows = figures["rows"]
    assert figures["machine"]["num_workers"] == figures["machine"]["num_processes"] == 2
    # psum, psum-bf16, and k=0, or 1 in 2 modes, for each of 2 wires.
    assert len(rows) == 2 * 8
    assert len([line for line in first.splitlines() if not line.startswith("#")]) == 2 * 8
    assert {row["num_wrong"] for row in rows} == {0}
    assert "2 workers in 2 process(es)" in first
    assert "share one memory" not in first
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_what_is_wrong_on_one_process_ends_both(tmp_path):
    options = ("--sizes", "4K", "--rounds", "1", "--skip", "1", "--wire", "float32", "--modes", "static")
    codes, ((first, errors), (second, _)) = run_both(tmp_path, *options, program=("-c", EXPECTS_ANOTHER_SUM))
    assert codes == [1, 1], errors
    # 1024 elements of both candidates, and nothing on process 0.
    assert "# Wrong elements: 2048 FAILED, in 2 of 2 rows" in first
    assert second == ""


def test_a_method_with_state_on_two_processes(tmp_path):
    options = ("--sizes", "4K", "--rounds", "1", "--warmup", "0", "--algo", "halves", "--json", "numbers.json")
    codes, ((first, errors), _) = run_both(tmp_path, *options, program=("-c", KNOWS_ANOTHER_METHOD))
    assert codes == [0, 0], errors
    assert "# No exact sum, so not checked: halves" in first
    row = json.loads((tmp_path / "numbers.json").read_text())["rows"][-1]
    assert (row["algorithm"], row["wire_bytes"], row["num_wrong"]) == ("halves", 2 * 256 * 4, None)


def test_one_of_two_processes_says_what_is_refused(tmp_path):
    codes, outputs = run_both(tmp_path, "--skip", "2")
    assert codes == [2, 2]
    assert "expected 0..1 with 2 workers" in outputs[0][1]
    assert "expected" not in outputs[1][1]
