"""Every printed number, from seconds that were made up, worked out by hand."""

import json

import numpy as np
import pytest

from jax_skipreduce._topologies.ring import RING
from jax_skipreduce.programs.bench import _rows, _table
from jax_skipreduce.programs.bench._candidates import Candidate, make_candidates
from jax_skipreduce.programs.bench._measure import Measurement
from jax_skipreduce.programs.bench._settings import (
    DType,
    Mode,
    Settings,
    default_skips,
    parse_choices,
    parse_list,
    parse_sizes,
    parse_skips,
)

F32, BF16 = DType.FLOAT32, DType.BFLOAT16
MIB = 2**20


def settings(**changes):
    values = {
        "sizes_bytes": (16 * MIB,),
        "skips": (0, 4),
        "modes": (Mode.STATIC, Mode.RANDOM),
        "wire_dtypes": (F32, BF16),
        "dtype": F32,
        "num_rounds": 3,
        "num_warmup_rounds": 1,
        "is_checked": True,
        "seed": 0,
    }
    return Settings(**(values | changes))


def rows_of(*measurements, num_workers=8, size_bytes=16 * MIB, dtype=F32):
    return _rows.make_rows(size_bytes, dtype, num_workers, measurements)


PSUM = Measurement(Candidate("psum", F32), F32, np.array([1.0, 2.0, 4.0]), 0)


def test_wire_bytes_by_hand():
    # 16 MiB are 4,194,304 float32, a slice on 8 workers 524,288 of them, in 14 steps.
    assert _rows.wire_bytes(4_194_304, 8, 0, F32) == 14 * 2_097_152 == 29_360_128
    assert _rows.wire_bytes(4_194_304, 8, 4, F32) == 10 * 2_097_152 == 20_971_520
    assert _rows.wire_bytes(4_194_304, 8, 7, BF16) == 7 * 1_048_576 == 7_340_032
    # 10 elements on 4 workers: slices of 3, the last one padded.
    assert _rows.wire_bytes(10, 4, 1, F32) == 5 * 3 * 4 == 60


@pytest.mark.parametrize("num_workers", [2, 3, 8])
def test_wire_bytes_are_those_of_the_schedule(num_workers):
    for num_skipped in range(num_workers):
        sent = set(RING.schedule(num_workers, num_skipped).slices_sent())
        assert {_rows.wire_bytes(num_workers * 5, num_workers, num_skipped, BF16)} == {n * 5 * 2 for n in sent}


def test_numbers_of_a_row_by_hand():
    half = Measurement(Candidate("ring", BF16, 4, Mode.RANDOM), BF16, np.array([0.5, 0.5, 2.0]), 7)
    psum, row = rows_of(PSUM, half)
    assert (psum.count, psum.wire_bytes, psum.p50_us) == (4_194_304, 29_360_128, 2e6)
    assert psum.algbw_gbps == pytest.approx(0.016777216 / 2)
    # nccl-tests: busbw = algbw * 2(N-1)/N, which is 1.75 on 8 workers.
    assert psum.busbw_gbps == pytest.approx(psum.algbw_gbps * 1.75)
    assert psum.p99_us == pytest.approx(3.96e6)  # 98 % of the way from 2 s to 4 s
    assert (psum.speedup, psum.speedup_p10, psum.speedup_p90) == (1, 1, 1)
    assert (psum.theoretical_speedup, psum.efficiency) == (1, 1)

    assert row.wire_bytes == 10_485_760
    assert row.algbw_gbps == pytest.approx(0.033554432)
    assert row.busbw_gbps == pytest.approx(0.02097152)
    # Within rounds: 1/0.5, 2/0.5, 4/2. The medians of both would give 2/0.5.
    assert row.speedup == 2
    assert row.speedup_p10 == pytest.approx(2)
    assert row.speedup_p90 == pytest.approx(3.6)
    assert row.theoretical_speedup == pytest.approx(2 * 14 / 10)
    assert row.efficiency == pytest.approx(2 / 2.8)
    assert (row.skip_ratio, row.num_wrong, row.mode, row.wire_dtype) == (0.5, 7, "random", "bfloat16")


def test_what_xla_widens_is_no_gain_in_theory():
    cast = Measurement(Candidate("psum-bf16", BF16), F32, np.ones(3), 0)
    honest = Measurement(Candidate("psum-bf16", BF16), BF16, np.ones(3), 0)
    _, wide, narrow = rows_of(PSUM, cast, honest)
    assert (wide.theoretical_speedup, wide.wire_bytes, wide.wire_dtype) == (1, 29_360_128, "float32")
    assert (narrow.theoretical_speedup, narrow.wire_bytes, narrow.wire_dtype) == (2, 14_680_064, "bfloat16")
    assert any("widens" in line for line in _table.closing([wide]))
    assert not any("widens" in line for line in _table.closing([narrow]))


def test_a_widened_baseline_in_bfloat16():
    psum = Measurement(Candidate("psum", BF16), F32, np.ones(2), 0)
    ring = Measurement(Candidate("ring", BF16, 0, Mode.STATIC), BF16, np.ones(2), 0)
    rows = rows_of(psum, ring, dtype=BF16)
    assert rows[0].count == 8 * MIB
    assert [row.wire_bytes for row in rows] == [14 * MIB * 4, 14 * MIB * 2]
    assert rows[1].theoretical_speedup == 2
    assert any("widens" in line for line in _table.closing(rows))


def test_times_of_rounds_are_optional():
    (row,) = rows_of(PSUM)
    assert "times_us" not in row.as_json(with_times=False)
    record = json.loads(json.dumps(row.as_json(with_times=True)))
    assert record["times_us"] == [1e6, 2e6, 4e6]
    assert record["redop"] == "sum"


def test_table_lines_keep_their_columns():
    (row,) = rows_of(PSUM)
    heading = _table.heading()
    assert len(heading[1]) == len(heading[2]) == len(_table.line(row))
    assert all(text.startswith("#") for text in heading)
    for end, name in ((10, "size"), (21, "count")):
        assert heading[1][:end].endswith(name)
    assert _table.line(row)[:21].split() == ["16777216", "4194304"]


def test_closing_says_what_is_wrong():
    right, wrong = rows_of(PSUM, Measurement(PSUM.candidate, F32, np.ones(3), 12))
    assert "# Wrong elements: 0 OK" in _table.closing([right])
    (text,) = [line for line in _table.closing([right, wrong]) if "Wrong" in line]
    assert "12 FAILED, in 1 of 2 rows" in text
    (unchecked,) = rows_of(Measurement(PSUM.candidate, F32, np.ones(3), None))
    assert any("not checked" in line for line in _table.closing([unchecked]))
    assert " N/A " in _table.line(unchecked)


def test_candidates():
    names = [candidate.name for candidate in make_candidates(settings())]
    assert names[:2] == ["psum", "psum-bf16"]
    # With k = 0 the shift makes no difference.
    assert names[2:5] == ["ring k=0 static float32", "ring k=4 static float32", "ring k=4 random float32"]
    assert len(names) == len(set(names)) == 2 + 2 * 3
    assert [c.name for c in make_candidates(settings(wire_dtypes=(F32,), modes=(Mode.RANDOM,)))] == [
        *("psum", "ring k=0 static float32", "ring k=4 random float32")
    ]
    assert not any("psum-bf16" in c.name for c in make_candidates(settings(dtype=BF16, wire_dtypes=(BF16,))))


def test_sizes():
    assert parse_sizes("4, 64k,1M,2G,1M", F32) == (4, 65_536, MIB, 2**31)
    assert parse_sizes("6", BF16) == (6,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("6", "no positive multiple of 4"),
        ("0", "no positive multiple"),
        ("1M,", "not a list"),
        ("1T", "not a size"),
        ("-4", "not a size"),
        ("1.5M", "not a size"),
    ],
)
def test_refuses_sizes(text, message):
    with pytest.raises(ValueError, match=message):
        parse_sizes(text, F32)


def test_skips():
    assert parse_skips("all", 4) == (0, 1, 2, 3)
    assert parse_skips("3,0,0", 4) == (0, 3)
    assert [default_skips(n) for n in (2, 3, 4, 8, 10)] == [(0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 2, 4, 6), (0, 2, 5, 7)]
    for text in ("4", "-1", "half", "1.0"):
        with pytest.raises(ValueError, match=r"expected 0\.\.3 with 4 workers"):
            parse_skips(text, 4)


def test_choices():
    assert parse_choices("random,static,random", Mode) == (Mode.RANDOM, Mode.STATIC)
    with pytest.raises(ValueError, match="'float16' is unknown: expected one or more of float32, bfloat16"):
        parse_choices("float32,float16", DType)
    with pytest.raises(ValueError, match="not a list"):
        parse_list("")
