"""Prints the tables of docs/results.md from files that `skipreduce bench --json` wrote.

One table per number of workers and wire dtype: speed-up over psum of the ring at random shifts, and the lowest quotient
of speed-up and theory in a row. Names of files are as in ``bench-8-500mbit-16M.json``.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any


def rate_of(path: Path) -> str:
    """``500mbit`` of ``bench-8-500mbit-16M.json``."""
    return path.stem.split("-")[2]


def summarize(files: list[tuple[str, dict[str, Any]]]) -> str:
    """Markdown from pairs of (rate, what a file holds)."""
    groups: dict[tuple[int, str], dict[tuple[str, int], dict[str, Any]]] = defaultdict(dict)
    for rate, figures in files:
        for row in figures["rows"]:
            if row["algorithm"] != "ring" or (row["mode"] == "static" and row["num_skipped"]):
                continue
            key = (figures["machine"]["num_workers"], row["wire_dtype"])
            cells = groups[key].setdefault((rate, row["size_bytes"] // 2**20), {})
            cells[row["num_skipped"]] = row
    lines = []
    for (num_workers, wire), by_link in sorted(groups.items(), key=lambda item: (-item[0][0], item[0][1] != "float32")):
        steps = sorted({k for cells in by_link.values() for k in cells})
        theory = {k: next(c[k]["theoretical_speedup"] for c in by_link.values() if k in c) for k in steps}
        lines += [
            f"{num_workers} workers, {wire} on the wire:",
            "",
            "| link | message | " + " | ".join(f"k={k}" for k in steps) + " | lowest efficiency |",
            "| --- | --- |" + " --- |" * (len(steps) + 1),
            "| theory | | " + " | ".join(f"{theory[k]:.2f}" for k in steps) + " | |",
        ]
        for (rate, mib), cells in by_link.items():
            values = " | ".join(f"{cells[k]['speedup']:.2f}" if k in cells else "" for k in steps)
            worst = min(cell["efficiency"] for cell in cells.values())
            lines.append(f"| {rate}/s | {mib} MiB | {values} | {worst:.3f} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    paths = parser.parse_args().files
    print(summarize([(rate_of(path), json.loads(path.read_text())) for path in paths]))


if __name__ == "__main__":
    main()
