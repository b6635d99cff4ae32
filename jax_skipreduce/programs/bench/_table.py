"""The table for the terminal: one line per row, in columns that users of nccl-tests know, and what goes around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax_skipreduce.programs.bench._rows import Row
from jax_skipreduce.programs.bench._settings import DType, Settings

# Two lines of heading, width, and what a row says there. A line that does not fit gets longer, nothing is cut off.
_COLUMNS: tuple[tuple[str, str, int, Callable[[Row], str]], ...] = (
    ("size", "(B)", 10, lambda row: str(row.size_bytes)),
    ("count", "(elements)", 10, lambda row: str(row.count)),
    ("type", "", 8, lambda row: row.dtype),
    ("redop", "", 5, lambda row: row.redop),
    ("algo", "", 9, lambda row: row.algorithm),
    ("k", "", 3, lambda row: "-" if row.mode is None else str(row.num_skipped)),
    ("shift", "", 6, lambda row: row.mode or "-"),
    ("wire", "type", 8, lambda row: row.wire_dtype),
    ("wire", "(B)", 10, lambda row: str(row.wire_bytes)),
    ("time p50", "(us)", 10, lambda row: f"{row.p50_us:.1f}"),
    ("time p99", "(us)", 10, lambda row: f"{row.p99_us:.1f}"),
    ("algbw", "(GB/s)", 8, lambda row: _bandwidth(row.algbw_gbps)),
    ("busbw", "(GB/s)", 8, lambda row: _bandwidth(row.busbw_gbps)),
    ("#wrong", "", 6, lambda row: "N/A" if row.num_wrong is None else str(row.num_wrong)),
    ("speed-up", "(psum=1)", 8, lambda row: f"{row.speedup:.3f}"),
    ("in", "theory", 6, lambda row: f"{row.theoretical_speedup:.3f}"),
    ("effi-", "ciency", 6, lambda row: f"{row.efficiency:.3f}"),
)


def preamble(settings: Settings, machine: dict[str, Any], num_candidates: int) -> list[str]:
    """What was run on what, above the table."""
    versions, kind = machine["versions"], machine["device_kind"]
    device = kind if kind == machine["platform"] else f"{kind} ({machine['platform']})"
    lines = [
        f"# skipreduce bench: {machine['num_workers']} workers in {machine['num_processes']} process(es), "
        f"{device}, {machine['cpu']}, {machine['cores']} cores",
        "# " + ", ".join(f"{name} {version}" for name, version in versions.items()),
        f"# {num_candidates} candidates in turns, {settings.num_rounds} rounds after {settings.num_warmup_rounds} to "
        f"warm up, seed {settings.seed}; results {'are checked first' if settings.is_checked else 'are not checked'}",
    ]
    if machine["platform"] == "cpu" and machine["num_processes"] == 1:
        lines.append(
            "# The workers share one memory: these are prices of copies, not of links. For links: skipreduce lab"
        )
    return lines


def heading() -> list[str]:
    """The two lines above the columns."""
    return ["#", "#" + _line(column[0] for column in _COLUMNS)[1:], "#" + _line(column[1] for column in _COLUMNS)[1:]]


def line(row: Row) -> str:
    """One row."""
    return _line(column[3](row) for column in _COLUMNS)


def closing(rows: Sequence[Row]) -> list[str]:
    """What is to be said of all rows, below the table."""
    lines = ["#"]
    if any(row.algorithm == "psum-bf16" and row.wire_dtype != DType.BFLOAT16 for row in rows) or any(
        row.algorithm == "psum" and row.dtype != row.wire_dtype for row in rows
    ):
        lines.append("# XLA widens the bfloat16 of a psum to float32 on this backend, so float32 travels.")
    wrong = [row for row in rows if row.num_wrong]
    if any(row.num_wrong is None and not row.is_method for row in rows):
        lines.append("# Wrong elements: N/A, not checked")
    elif not wrong:
        lines.append("# Wrong elements: 0 OK")
    else:
        total = sum(row.num_wrong or 0 for row in wrong)
        lines.append(
            f"# Wrong elements: {total} FAILED, in {len(wrong)} of {len(rows)} rows. Their times mean nothing."
        )
    if names := dict.fromkeys(row.algorithm for row in rows if row.is_method):
        lines.append(f"# No exact sum, so not checked: {', '.join(names)}")
    return lines


def _line(cells: Iterable[str]) -> str:
    return " ".join(cell.rjust(column[2]) for cell, column in zip(cells, _COLUMNS, strict=True))


def _bandwidth(gbps: float) -> str:
    # Three digits also of what 100 Mbit/s give.
    return f"{gbps:.4f}"
