"""`skipreduce bench` in one process, as users call it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from typer.testing import CliRunner

import jax_skipreduce as sr
from jax_skipreduce.__main__ import make_app
from jax_skipreduce._transform.registry import METHODS, register
from jax_skipreduce.programs.bench import _candidates, _measure
from jax_skipreduce.programs.common import methods
from tests.seams.toys import HalvesMethod

SMALL = ("--workers", "4", "--sizes", "4K", "--rounds", "2", "--warmup", "0", "--skip", "0,2", "--wire", "float32")

# Where the columns of the table are in a record of the JSON file.
COLUMNS = (
    *("size_bytes", "count", "dtype", "redop", "algorithm", "num_skipped", "mode", "wire_dtype", "wire_bytes"),
    *("p50_us", "p99_us", "algbw_gbps", "busbw_gbps", "num_wrong", "speedup", "theoretical_speedup", "efficiency"),
)


def run(*arguments):
    """Exit code and output."""
    result = CliRunner().invoke(make_app(), ["bench", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def lines_of(output):
    """The rows of the table, as words."""
    return [line.split() for line in output.splitlines() if not line.startswith("#")]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.native
def test_native_kernels_beside_the_ring(monkeypatch):
    options = ("--workers", "4", "--sizes", "4004", "--rounds", "1", "--skip", "0,3", "--algo", "ring,native")
    code, output = run(*options, "--json", "numbers.json", "--plot", "speed.png")
    assert code == 0, output
    rows = json.loads(Path("numbers.json").read_text())["rows"]
    names = [row["algorithm"] for row in rows]
    assert names == ["psum", "psum-bf16", *["ring"] * 6, *["native"] * 6]
    assert {row["num_wrong"] for row in rows} == {0}


def test_native_kernels_that_are_not_there(monkeypatch):
    monkeypatch.setattr("jax_skipreduce._backends.ffi.reason_against_cpu", lambda: "they are on holiday")
    code, output = run("--workers", "4", "--algo", "native")
    assert code == 2
    assert "--algo" in output
    assert "no native kernels: they are on holiday" in output


def test_writes_table_numbers_and_figure(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/skipreduce", "bench", "--plot", "a b.png"])
    # 4004 bytes are 1001 elements, which 4 workers cannot share evenly.
    options = ("--workers", "4", "--sizes", "4004,16K", "--rounds", "3", "--warmup", "1", "--skip", "0,3")
    code, output = run(*options, "--json", "numbers.json", "--raw", "--plot", "speed.png")
    assert code == 0, output
    figures = json.loads(Path("numbers.json").read_text())
    rows = figures["rows"]
    # psum, psum-bf16, and for each of 2 wires nothing skipped, or 3 steps in 2 modes.
    assert len(rows) == 2 * (2 + 6)
    assert [row["size_bytes"] for row in rows] == [4004] * 8 + [16384] * 8
    assert {row["num_wrong"] for row in rows} == {0}
    assert "# Wrong elements: 0 OK" in output
    for row in rows:
        assert len(row["times_us"]) == 3
        assert min(row["times_us"]) > 0
    # 3 of 6 steps, slices of 251 elements, 2 bytes each; XLA:CPU widens the bfloat16 of a psum.
    last = rows[7]
    assert (last["num_skipped"], last["mode"], last["wire_bytes"]) == (3, "random", 3 * 251 * 2)
    assert last["theoretical_speedup"] == 4
    assert (rows[1]["algorithm"], rows[1]["wire_dtype"]) == ("psum-bf16", "float32")

    for words, row in zip(lines_of(output), rows, strict=True):
        for word, name in zip(words, COLUMNS, strict=True):
            value = row[name]
            if word == "-":
                assert row["mode"] is None
                assert value in (0, None)
            elif isinstance(value, float):
                assert float(word) == pytest.approx(value, abs=0.051 if name.endswith("_us") else 0.00051)
            else:
                assert word == str(value)

    assert figures["machine"]["num_workers"] == 4
    assert figures["machine"]["num_processes"] == 1
    assert figures["machine"]["platform"] == "cpu"
    assert figures["machine"]["versions"]["jax"] == jax.__version__
    assert figures["machine"]["versions"]["jax_skipreduce"] == sr.__version__
    assert figures["settings"]["skips"] == [0, 3]
    assert figures["command"] == "skipreduce bench --plot 'a b.png'"
    picture = Path("speed.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_bfloat16_messages_one_mode_and_no_check():
    code, output = run(
        *SMALL[:8], "--skip", "1", "--dtype", "bfloat16", "--modes", "random", "--no-check", "--json", "n.json"
    )
    assert code == 0, output
    psum, ring = json.loads(Path("n.json").read_text())["rows"]
    assert (psum["algorithm"], psum["dtype"], psum["count"]) == ("psum", "bfloat16", 2048)
    assert (ring["mode"], ring["wire_dtype"], ring["wire_bytes"]) == ("random", "bfloat16", 5 * 512 * 2)
    assert ring["num_wrong"] is None
    assert "times_us" not in ring
    assert "N/A" in output
    assert "not checked" in output


def test_a_compressor_by_its_name():
    register(HalvesMethod)
    try:
        code, output = run(*SMALL, "--algo", "ring,halves,skipreduce", "--json", "numbers.json", "--plot", "speed.png")
    finally:
        del METHODS[HalvesMethod.name]
    assert code == 0, output
    rows = json.loads(Path("numbers.json").read_text())["rows"]
    assert [row["algorithm"] for row in rows] == ["psum", *["ring"] * 3, "halves", "skipreduce"]
    assert [row["num_wrong"] for row in rows] == [0, 0, 0, 0, None, None]
    # 1024 elements: half of them in slices of 128, in 6 steps; and slices of 256 in 4 of 6 steps.
    assert [row["wire_bytes"] for row in rows[4:]] == [6 * 128 * 4, 4 * 256 * 4]
    assert [row["theoretical_speedup"] for row in rows[4:]] == [2, 1.5]
    assert {row["wire_dtype"] for row in rows} == {"float32"}
    assert "# Wrong elements: 0 OK" in output
    assert "# No exact sum, so not checked: halves, skipreduce" in output
    halves = lines_of(output)[4]
    assert (*halves[3:7], halves[13]) == ("mean", "halves", "-", "-", "N/A")


def test_the_state_of_a_compressor_is_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(methods, "init", lambda *args, init=methods.init: made.append(args) or init(*args))
    code, output = run(*SMALL, "--algo", "skipreduce")
    assert code == 0, output
    assert len(made) == 1


def test_wrong_elements_are_reported_and_end_with_1(monkeypatch):
    def faulty(candidate, dtype):
        right = _candidates.reduction(candidate, dtype)
        if candidate.num_skipped != 2:
            return right
        return lambda x, shift: right(x, shift).at[3].add(1.0)

    monkeypatch.setattr(_measure, "reduction", faulty)
    code, output = run(*SMALL, "--json", "numbers.json", "--plot", "speed.png")
    assert code == 1
    # One element on each of 4 workers; the random one is checked at 4 shifts.
    assert "# Wrong elements: 20 FAILED, in 2 of 4 rows" in output
    rows = json.loads(Path("numbers.json").read_text())["rows"]
    assert [row["num_wrong"] for row in rows] == [0, 0, 4, 16]
    assert [words[13] for words in lines_of(output)] == ["0", "0", "4", "16"]
    assert Path("speed.png").exists()


def test_each_candidate_is_compiled_once_and_timed_once_in_a_round(monkeypatch):
    compiled, shifts_seen = [], []
    compile_it = _measure.Bench.compile

    class Counting:
        def __init__(self, program):
            self.program = program

        def as_text(self):
            return self.program.as_text()

        def __call__(self, message, shift):
            compiled[-1].append(self)
            shifts_seen.append((self, int(shift)))
            return self.program(message, shift)

    def counting(self, reduce, message):
        program = compile_it(self, reduce, message)
        if message.dtype == jnp.int32:  # the barrier
            return program
        compiled.append([])
        return Counting(program)

    monkeypatch.setattr(_measure.Bench, "compile", counting)
    options = (*SMALL[:4], "--rounds", "5", "--warmup", "2", "--skip", "0,2", "--wire", "float32", "--no-check")
    code, output = run(*options)
    assert code == 0, output
    assert len(compiled) == 4
    calls = compiled[-1]
    assert len(calls) == 4 * 7
    rounds = [calls[start : start + 4] for start in range(0, 28, 4)]
    assert all(len(set(one)) == 4 for one in rounds)
    assert len({tuple(map(id, one)) for one in rounds}) > 1  # the order is drawn anew
    assert len({shift for _, shift in shifts_seen}) > 1


def test_the_barrier_waits_for_all_workers():
    bench = _measure.Bench(
        _settings_of_one_size(), (_candidates.Candidate("psum", _measure.DType.FLOAT32),), jax.devices()[:4]
    )
    token = bench._stacked(1, lambda _: jnp.zeros(1, jnp.int32))
    program = bench.compile(lambda token, _: lax.psum(token, "data"), token)
    # Were it left out as the sum of equal values, nobody would wait.
    assert "all-reduce" in program.as_text()
    bench._barrier()


def _settings_of_one_size():
    from jax_skipreduce.programs.bench._settings import DType, Settings

    return Settings((4096,), (0,), (), (DType.FLOAT32,), DType.FLOAT32, 1, 0, True, 0)


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        (["--workers", "9"], "--workers", "9 workers, but JAX has 8 cpu devices"),
        # typer words these itself, differently in each version.
        (["--workers", "1"], "--workers", ""),
        (["--rounds", "0"], "--rounds", ""),
        (["--warmup", "-1"], "--warmup", ""),
        (["--dtype", "float16"], "--dtype", "'float32', 'bfloat16'"),
        (["--workers", "4", "--skip", "4"], "--skip", "expected 0..3 with 4 workers"),
        (["--skip", "most"], "--skip", "most steps cannot be skipped"),
        (["--sizes", "1M,6"], "--sizes", "6 bytes are no positive multiple of 4"),
        (["--sizes", "big"], "--sizes", "'big' is not a size"),
        (["--modes", "dropout"], "--modes", "'dropout' is unknown: expected one or more of static, random"),
        (["--wire", "float16"], "--wire", "'float16' is unknown"),
        (["--dtype", "bfloat16", "--wire", "float32"], "--wire", "does not travel in float32"),
        (["--plot", "speed.txt"], "--plot", "ends in .png"),
        (["--plot", "nowhere/speed.png"], "--plot", "there is no folder"),
        (["--json", "nowhere/numbers.json"], "--json", "there is no folder"),
        (["--raw"], "--raw", "--json names"),
        (["--process-id", "1"], "--coordinator", "needed for several processes"),
        (["--coordinator", "localhost:1"], "--coordinator", "needs --num-processes and --process-id"),
    ],
)
def test_refuses_wrong_options(arguments, option, message):
    code, output = run(*arguments)
    words = " ".join(re.sub(r"[^\x20-\x7e]+", " ", output).split())
    assert code == 2
    assert option in words
    assert message in words


def test_says_how_to_go_on_with_too_many_workers_for_bfloat16(monkeypatch):
    monkeypatch.setitem(sys.modules["jax_skipreduce.programs.bench._check"]._EXACT_UP_TO, _measure.DType.BFLOAT16, 6)
    code, output = run("--workers", "4", "--sizes", "4K")
    words = " ".join(re.sub(r"[^\x20-\x7e]+", " ", output).split())
    assert code == 2
    assert "bfloat16 can be checked with up to 3 workers, not 4" in words
    assert "--no-check" in words


def test_help_loads_nothing_that_it_does_not_use():
    code = (
        "import sys; sys.argv = ['skipreduce', 'bench', '--help']\n"
        "from jax_skipreduce.__main__ import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print([name for name in ('matplotlib', 'jax_skipreduce.programs.bench._measure') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert "--sizes" in result.stdout
    assert result.stdout.splitlines()[-1] == "[]"
