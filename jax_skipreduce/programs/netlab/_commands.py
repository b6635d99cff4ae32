"""The `ip` and `tc` commands that make a lab and remove it: built by pure functions, run or printed as they are."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from jax_skipreduce.programs.netlab._plan import SUBNET, Link, Plan, Worker
from jax_skipreduce.programs.netlab._units import format_rate

_BRIDGE = "bridge"
_DEVICE = "eth0"
# Least, first and largest of a TCP connection, which cannot have more than the largest on its way. With the default of
# some megabytes a queue stands in front of each link, first in first out, and the short message by which a receiver
# asks Gloo for the next slice waits behind the data of others: 8 ms in each step of a ring at 500 Mbit/s. The fair
# queues that hosts have do not let it wait. 256 KiB fill the links of a lab: psum is as fast as before.
_RECEIVE_BUFFER_BYTES = "4096 131072 262144"
# `ip netns exec NAME` shows the files of /etc/netns/NAME as those of /etc.
ETC_NETNS = Path("/etc/netns")


class LabError(RuntimeError):
    """A lab could not be made, or not be removed."""


@dataclasses.dataclass(frozen=True)
class Command:
    """To be run on the host."""

    argv: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.argv)


@dataclasses.dataclass(frozen=True)
class File:
    """To be written on the host, together with its folder."""

    path: Path
    text: str

    def __str__(self) -> str:
        folder, path = shlex.quote(str(self.path.parent)), shlex.quote(str(self.path))
        return f"mkdir -p {folder} && printf '%s\\n' {shlex.join(self.text.splitlines())} > {path}"


def setup(plan: Plan) -> Iterator[Command | File]:
    """All that makes the lab, in order."""
    switch = ("ip", "-n", plan.switch)
    yield Command(("ip", "netns", "add", plan.switch))
    yield Command((*switch, "link", "add", "name", _BRIDGE, "type", "bridge"))
    yield Command((*switch, "link", "set", _BRIDGE, "up"))
    for worker in plan.workers:
        yield File(ETC_NETNS / worker.namespace / "hosts", hosts(plan, worker.rank))
        yield from _setup_worker(plan, worker)


def _setup_worker(plan: Plan, worker: Worker) -> Iterator[Command]:
    name = worker.namespace
    inside, switch = ("ip", "-n", name), ("ip", "-n", plan.switch)
    yield Command(("ip", "netns", "add", name))
    # Both ends are made where they belong, so no interface is ever seen on the host.
    peer = ("peer", "name", worker.port, "netns", plan.switch)
    yield Command(("ip", "link", "add", "name", _DEVICE, "netns", name, "type", "veth", *peer))
    # Without -e, a kernel without IPv6 would not know the second key.
    keys = (
        f"net.ipv4.tcp_congestion_control={plan.congestion_control}",
        f"net.ipv4.tcp_rmem={_RECEIVE_BUFFER_BYTES}",
        "net.ipv6.conf.all.disable_ipv6=1",
    )
    yield Command(("ip", "netns", "exec", name, "sysctl", "-eqw", *keys))
    yield Command((*inside, "addr", "add", f"{worker.address}/{SUBNET.prefixlen}", "dev", _DEVICE))
    yield Command((*inside, "link", "set", "lo", "up"))
    yield Command((*inside, "link", "set", _DEVICE, "up"))
    yield Command((*switch, "link", "set", worker.port, "master", _BRIDGE, "up"))
    # A qdisc limits what leaves an interface: here what the worker sends, and at the bridge what it receives, so that
    # several senders to one worker share its rate (incast).
    yield limit(name, _DEVICE, worker.link)
    yield limit(plan.switch, worker.port, worker.link)


def limit(namespace: str, device: str, link: Link) -> Command:
    """Limits what leaves `device`."""
    settings = ("rate", format_rate(link.rate), "burst", f"{link.burst_bytes}b", "latency", f"{link.queue_us}us")
    return Command(("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *settings))


def hosts(plan: Plan, rank: int) -> str:
    """/etc/hosts of a worker.

    Gloo tells its peers the address that the host name stands for, so the name of the machine, which all workers share,
    has to stand for another address in each namespace. The others are there as w0, w1, ...
    """
    lines = ["127.0.0.1 localhost"]
    if plan.host_name != "localhost":
        lines.append(f"{plan.workers[rank].address} {plan.host_name}")
    lines += [f"{worker.address} w{worker.rank}" for worker in plan.workers]
    return "\n".join(lines) + "\n"


def inside(namespace: str, command: Sequence[str]) -> Command:
    """Runs `command` in a namespace, and has the kernel kill it when the launcher dies, however it dies."""
    return Command(("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", namespace, *command))


def teardown(namespaces: Sequence[str]) -> Iterator[Command]:
    """Removes namespaces, and with them their interfaces, and their files."""
    for name in namespaces:
        yield Command(("ip", "netns", "del", name))
        yield Command(("rm", "-rf", str(ETC_NETNS / name)))


def execute(step: Command | File) -> None:
    """Runs a command of `setup`, or writes its file.

    Raises:
      LabError: it failed; the message has the command and what it said.
    """
    if isinstance(step, File):
        step.path.parent.mkdir(parents=True, exist_ok=True)
        step.path.write_text(step.text)
        return
    # Of its own session, so that Ctrl-C does not end it half way.
    result = subprocess.run(
        step.argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", start_new_session=True
    )
    if result.returncode:
        said = (result.stderr or result.stdout).strip() or f"status {result.returncode}"
        raise LabError(f"{step}: {said}")
