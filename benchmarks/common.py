"""What the benchmarks share: the machine, and timing that is fair on a noisy one."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_skipreduce.programs.common.machine import cpu_name, versions


def use_cpu_devices(num_devices: int) -> None:
    """Makes this process `num_devices` CPU devices. Before the first use of JAX."""
    os.environ.setdefault("NPROC", "16")  # XLA may hang with many collectives in flight on few cores
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", num_devices)


def machine() -> dict[str, Any]:
    """What the figures depend on."""
    return {"cpu": cpu_name(), "cores": os.cpu_count(), **versions("jax")}


def interleaved(candidates: dict[str, Callable[[], Any]], num_rounds: int) -> dict[str, np.ndarray]:
    """Seconds of each candidate in each round. All run in every round, in an order that is drawn anew."""
    for run in candidates.values():
        for _ in range(2):
            jax.block_until_ready(run())
    order = np.random.default_rng(0)
    seconds = {name: np.zeros(num_rounds) for name in candidates}
    names = list(candidates)
    for number in range(num_rounds):
        for index in order.permutation(len(names)):
            start = time.perf_counter()
            jax.block_until_ready(candidates[names[index]]())
            seconds[names[index]][number] = time.perf_counter() - start
    return seconds


def write_json(path: str | Path | None, figures: dict[str, Any]) -> None:
    """Writes a file that is short: seven digits per number, one line for what fits in one."""
    if path:
        Path(path).write_text(as_text(rounded(figures)) + "\n")
        print(f"wrote {path}")


def rounded(value: Any) -> Any:
    """The same plain data, with seven significant digits of each float."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(part) for part in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def as_text(value: Any, indent: str = "", width: int = 160) -> str:
    """JSON in which plain lists, and whatever fits in `width` characters, take one line."""
    line = json.dumps(value)
    is_plain = not isinstance(value, dict) and "[" not in line[1:] and "{" not in line
    if is_plain or len(indent) + len(line) <= width:
        return line
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {as_text(part, indent + ' ', width)}" for key, part in value.items()]
    else:
        parts = [as_text(part, indent + " ", width) for part in value]
    opening, closing = ("{", "}") if isinstance(value, dict) else ("[", "]")
    return f"{opening}\n" + ",\n".join(f"{indent} {part}" for part in parts) + f"\n{indent}{closing}"
