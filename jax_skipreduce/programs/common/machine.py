"""What figures depend on: the name of the CPU, and versions."""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import jax_skipreduce


def cpu_name() -> str:
    """The model of this machine's CPU, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions(*packages: str) -> dict[str, str]:
    """By name: this package's version, those of other installed packages, and Python's."""
    return {
        "jax_skipreduce": jax_skipreduce.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "python": platform.python_version(),
    }
