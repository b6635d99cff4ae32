"""Whether a lab can be made on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from jax_skipreduce.programs.netlab._script import PRIVATE_FOLDERS, UNSHARE

# In namespaces that end with the shell, so nothing can be left behind.
_NAMESPACES = " && ".join((*PRIVATE_FOLDERS, "ip netns add w0"))
_LINKS = (
    "ip link add name bridge type bridge && ip link add name a type veth peer name b netns w0 && "
    "tc qdisc add dev a root tbf rate 1gbit burst 500000b latency 100000us"
)
_PACKAGES = {
    "ip": "iproute2",
    "tc": "iproute2",
    "setpriv": "util-linux",
    "unshare": "util-linux",
    "mount": "util-linux (Debian: mount)",
    "sysctl": "procps",
}


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
    attempt = f"{_NAMESPACES} && echo && {_LINKS}"
    result = subprocess.run(
        [*UNSHARE, "sh", "-c", attempt], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if not result.returncode:
        return None
    said = " ".join(result.stderr.split())
    # The shell writes a line once the namespaces are there.
    if not result.stdout:
        return (
            "skipreduce lab needs the permission to make namespaces and to mount in them, which this root lacks, as in "
            f"most containers (docker run --privileged gives it): {said}"
        )
    return f"skipreduce lab needs a bridge, veth and tc tbf, and not all of it is allowed or in the kernel here: {said}"
