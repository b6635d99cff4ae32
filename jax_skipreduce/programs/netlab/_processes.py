"""The processes of network namespaces, their children's children included: found as `ip netns pids` does."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

# Where `ip netns add` mounts a namespace, under its name.
NETNS = Path("/run/netns")


def processes_in(namespaces: Sequence[str]) -> set[int]:
    """Process ids. A namespace that is not there has none."""
    wanted = set()
    for name in namespaces:
        with contextlib.suppress(OSError):
            wanted.add(_identity(NETNS / name))
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            # It may end while we look; a zombie has no namespace any more.
            with contextlib.suppress(OSError):
                if _identity(path / "ns/net") in wanted:
                    found.add(int(path.name))
    return found


def send_signal(pids: set[int], signum: signal.Signals) -> None:
    """To all of them that still are."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)


def kill_all(namespaces: Sequence[str], timeout_s: float = 10) -> set[int]:
    """Kills until nothing runs there: what is killed may just have started something. Returns who would not die."""
    deadline = time.monotonic() + timeout_s
    while (pids := processes_in(namespaces)) and time.monotonic() < deadline:
        send_signal(pids, signal.SIGKILL)
        time.sleep(0.02)
    return pids


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_dev, status.st_ino
