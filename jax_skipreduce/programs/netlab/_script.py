"""The shell commands that make a lab: pure functions. A lab runs them, and `--dry-run` prints them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence

from jax_skipreduce.programs.netlab._plan import SUBNET, Link, Plan, Worker
from jax_skipreduce.programs.netlab._units import format_rate

# Everything of a lab is in these namespaces: its process 1 makes the links and starts the workers. When that process
# ends, the kernel kills the workers and removes the links, and it does end when `unshare` is killed (--kill-child).
UNSHARE = ("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
# `ip netns` keeps its names in the first folder, and shows the files of /etc/netns/NAME as those of /etc. With folders
# of its own, each lab may use the same names.
PRIVATE_FOLDERS = (
    "mkdir -p /var/run/netns /etc/netns",
    "mount -t tmpfs tmpfs /var/run/netns",
    "mount -t tmpfs tmpfs /etc/netns",
)

_SWITCH = "switch"
_BRIDGE = "bridge"
_DEVICE = "eth0"
# The smallest, first and largest receive window of a TCP connection. A sender cannot have more than the largest on its
# way. With the default of some megabytes, a first-in-first-out queue builds up in front of each link. The short message
# by which a receiver asks Gloo for the next slice then waits behind the data of others: 8 ms in each step of a ring at
# 500 Mbit/s. The fair queues of real hosts do not let it wait. 256 KiB fill the links of a lab: psum is as fast as
# before.
_RECEIVE_BUFFER_BYTES = "4096 131072 262144"


def setup(plan: Plan) -> Iterator[str]:
    """The commands that make the lab, in order, to be run by process 1 of the lab's namespaces."""
    yield from PRIVATE_FOLDERS
    yield f"ip netns add {_SWITCH}"
    yield f"ip -n {_SWITCH} link add name {_BRIDGE} type bridge"
    yield f"ip -n {_SWITCH} link set {_BRIDGE} up"
    for worker in plan.workers:
        yield from _setup_worker(plan, worker)


def _setup_worker(plan: Plan, worker: Worker) -> Iterator[str]:
    name = worker.name
    yield f"mkdir /etc/netns/{name}"
    yield f"printf '%s\\n' {shlex.join(hosts(plan, worker.rank))} > /etc/netns/{name}/hosts"
    yield f"ip netns add {name}"
    yield f"ip link add name {_DEVICE} netns {name} type veth peer name {name} netns {_SWITCH}"
    # Without -e, a kernel without IPv6 would not know the last key.
    keys = (
        f"net.ipv4.tcp_congestion_control={plan.congestion_control}",
        f"net.ipv4.tcp_rmem={_RECEIVE_BUFFER_BYTES}",
        "net.ipv6.conf.all.disable_ipv6=1",
    )
    yield f"ip netns exec {name} sysctl -eqw {shlex.join(keys)}"
    yield f"ip -n {name} addr add {worker.address}/{SUBNET.prefixlen} dev {_DEVICE}"
    yield f"ip -n {name} link set lo up"
    yield f"ip -n {name} link set {_DEVICE} up"
    yield f"ip -n {_SWITCH} link set {name} master {_BRIDGE} up"
    # A qdisc limits what leaves an interface. At the worker that is what it sends. At the bridge it is what the worker
    # receives, so several senders to one worker share its rate (incast).
    yield limit(name, _DEVICE, worker.link)
    yield limit(_SWITCH, name, worker.link)


def limit(namespace: str, device: str, link: Link) -> str:
    """The command that limits what leaves `device`."""
    settings = f"rate {format_rate(link.rate)} burst {link.burst_bytes}b latency {link.queue_us}us"
    return f"tc -n {namespace} qdisc add dev {device} root tbf {settings}"


def hosts(plan: Plan, rank: int) -> list[str]:
    """The lines of a worker's /etc/hosts.

    Gloo tells its peers the address that the host name stands for. All workers share the name of the machine, so the
    name has to stand for another address in each namespace. The other workers are there as w0, w1, ...
    """
    lines = ["127.0.0.1 localhost"]
    if plan.host_name != "localhost":
        lines.append(f"{plan.workers[rank].address} {plan.host_name}")
    return lines + [f"{worker.address} {worker.name}" for worker in plan.workers]


def inside(worker: Worker, command: Sequence[str]) -> list[str]:
    """Program and arguments that run `command` in the namespace of a worker."""
    return ["ip", "netns", "exec", worker.name, *command]


def script(plan: Plan, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """The lines of a shell script that makes the lab, runs the workers and waits for them."""
    yield f"{shlex.join(UNSHARE)} sh -e <<'END_OF_LAB'"
    # Process 1 gets only the signals that it handles. The kernel ends the rest when it exits.
    yield "trap 'exit 130' INT"
    yield "trap 'exit 143' TERM"
    yield from setup(plan)
    for worker, env in zip(plan.workers, environments, strict=True):
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        yield f"{variables} {shlex.join(inside(worker, command))} &"
    yield "wait"
    yield "END_OF_LAB"
