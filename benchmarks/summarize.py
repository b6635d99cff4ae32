"""Prints the tables of docs/results.md from a file that `benchmarks/compact.py` wrote.

    python benchmarks/summarize.py docs/results/bench.json

One table per number of workers and wire dtype: the speed-up over psum of the ring at random shifts, and the lowest
speed-up / theory in a row. The name of a measurement says its link, as in ``bench-8-500mbit-16M``.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any


def summarize(measurements: dict[str, dict[str, Any]]) -> str:
    """Markdown from measurements by name."""
    groups: dict[tuple[int, str], dict[tuple[str, int], dict[str, Any]]] = defaultdict(dict)
    for name, figures in measurements.items():
        rate = name.split("-")[2]  # 500mbit of bench-8-500mbit-16M
        for numbers in figures["rows"]:
            row = dict(zip(figures["columns"], numbers, strict=True))
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    print(summarize(json.loads(parser.parse_args().file.read_text())))


if __name__ == "__main__":
    main()
