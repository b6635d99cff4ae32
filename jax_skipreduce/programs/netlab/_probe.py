"""Whether a lab can be made on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

# In a namespace that has no name and ends with the shell, so nothing can be left behind.
_TRY = (
    "ip link add name bridge type bridge && ip link add name a type veth peer name b && "
    "tc qdisc add dev a root tbf rate 1gbit burst 500000b latency 100000us"
)
_PACKAGES = {"ip": "iproute2", "tc": "iproute2", "setpriv": "util-linux", "unshare": "util-linux", "sysctl": "procps"}


def unavailable() -> str | None:
    """Why no lab can be made here, as a sentence; None if one can.

    >>> reason = unavailable()
    >>> reason is None or reason.startswith("skipreduce lab needs")
    True
    """
    if sys.platform != "linux":
        return f"skipreduce lab needs Linux and its network namespaces; this is {sys.platform}."
    for program, package in _PACKAGES.items():
        if shutil.which(program) is None:
            return f"skipreduce lab needs the program {program}, which is not in PATH: install {package}."
    if os.geteuid() != 0:
        return "skipreduce lab needs root to make network namespaces: run it with sudo (or see --dry-run)."
    result = subprocess.run(
        ["unshare", "--net", "sh", "-c", _TRY], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if result.returncode:
        return (
            "skipreduce lab needs network namespaces, a bridge, veth and tc tbf, and not all of it is allowed or in "
            f"the kernel here: {' '.join(result.stderr.split())}"
        )
    return None
