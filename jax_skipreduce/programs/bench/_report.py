"""What the numbers depend on, and the JSON file."""

from __future__ import annotations

import dataclasses
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jax_skipreduce.programs.bench._rows import Row
from jax_skipreduce.programs.bench._settings import Settings
from jax_skipreduce.programs.common.machine import cpu_name, versions


def machine(devices: Sequence[Any]) -> dict[str, Any]:
    """This process's machine, its devices and versions."""
    return {
        "num_workers": len(devices),
        "num_processes": jax.process_count(),
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "versions": versions("jax", "jaxlib"),
    }


def command_line() -> str:
    """How this process was called."""
    return shlex.join(["skipreduce", *sys.argv[1:]])


def as_json(settings: Settings, machine: dict[str, Any], rows: Sequence[Row], with_times: bool) -> dict[str, Any]:
    """All that was measured, and what it depends on."""
    return {
        "command": command_line(),
        "machine": machine,
        "settings": dataclasses.asdict(settings),
        "rows": [row.as_json(with_times) for row in rows],
    }
