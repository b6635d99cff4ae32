"""Keeps of the files that `skipreduce bench --json` and `skipreduce tta --json` wrote what docs/results.md shows.

    python benchmarks/compact.py docs/results/bench.json bench-*.json

The first file is written. It has one entry per measurement, under the name of the file that it comes from. Numbers
have the digits that tables print and pictures need. Times of single steps and checksums are left out.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import common

# By column of `rows`, the digits after the point; None for what is not rounded.
BENCH_COLUMNS: dict[str, int | None] = {
    **dict.fromkeys(("size_bytes", "algorithm", "num_skipped", "mode", "wire_dtype", "num_wrong")),
    **dict.fromkeys(("p50_us", "p99_us"), 1),
    **dict.fromkeys(("speedup", "speedup_p10", "speedup_p90", "theoretical_speedup", "efficiency"), 5),
}
TTA_SETTINGS = ("workload", "num_workers", "rate", "num_steps", "evaluation_interval", "batch_size", "learning_rate")


def bench(figures: dict[str, Any]) -> dict[str, Any]:
    """A file of `skipreduce bench --json`: the table and its picture."""
    return {
        "command": figures["command"],
        "machine": figures["machine"],
        "columns": list(BENCH_COLUMNS),
        "rows": [
            [row[name] if digits is None else round(row[name], digits) for name, digits in BENCH_COLUMNS.items()]
            for row in figures["rows"]
        ],
    }


def tta(figures: dict[str, Any]) -> dict[str, Any]:
    """One measurement in a file of `skipreduce tta --json`: its two tables and three pictures."""
    methods = {
        name: {key: value for key, value in summary.items() if key != "seeds"}
        | {"seeds": [_run(figures, name, outcome) for outcome in summary["seeds"]]}
        for name, summary in figures["methods"].items()
    }
    return {
        "settings": {name: figures["settings"][name] for name in TTA_SETTINGS},
        "machine": figures["machine"],
        "versions": figures["versions"],
        "gradient_bytes": figures["gradient_bytes"],
        "target": figures["target"],
        "methods": common.rounded(methods),
        "breakdown_seconds": common.rounded(figures["breakdown"]),
    }


def _run(figures: dict[str, Any], method: str, outcome: dict[str, Any]) -> dict[str, Any]:
    """What one training came to, and its curve."""
    (run,) = (run for run in figures["runs"] if (run["method"], run["seed"]) == (method, outcome["seed"]))
    kept = {name: outcome[name] for name in ("seed", "final_accuracy", "p50_seconds", "seconds_to_target", "speedup")}
    curve = run["evaluations"]
    return kept | {
        "seconds": [round(each["seconds"], 2) for each in curve],
        "accuracy": [round(each["accuracy"], 4) for each in curve],
    }


def compacted(name: str, figures: dict[str, Any]) -> dict[str, Any]:
    """By name, what is kept of the measurements in one file."""
    if "measurements" not in figures:
        return {name: bench(figures)}
    names = (
        [name] if len(figures["measurements"]) == 1 else [f"{name}-{i}" for i in range(len(figures["measurements"]))]
    )
    return dict(zip(names, map(tta, figures["measurements"]), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="the compact file")
    parser.add_argument("files", nargs="+", type=Path, help="files that the programs wrote")
    args = parser.parse_args()
    kept: dict[str, Any] = {}
    for path in args.files:
        kept |= compacted(path.stem, json.loads(path.read_text()))
    args.output.write_text(common.as_text(kept) + "\n")


if __name__ == "__main__":
    main()
