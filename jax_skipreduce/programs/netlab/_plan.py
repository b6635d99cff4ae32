"""What a lab consists of: names, addresses and links. Plain data; nothing here touches the machine."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Sequence

from jax_skipreduce.programs.netlab._units import parse_duration, parse_rate

PREFIX = "skipreduce-"
# The bridge is in a namespace too, so no address, interface or firewall rule of the host can collide with a lab, and
# all labs may use this subnet at the same time.
SUBNET = ipaddress.ip_network("10.77.0.0/16")
# Nobody else listens in a namespace that was just made.
COORDINATOR_PORT = 29400
# A bridge has 1024 ports.
MAX_WORKERS = 1000

# An idle link saves up this much time of its rate, which the next message then sends at once: more would let short
# messages escape the limit. With less, a link falls short of its rate: the bucket is full before the kernel, on busy
# cores, comes back to it, and packets of up to 64 KiB that do not fit are cut up. In a ring of TCP streams (cubic,
# 2 MiB a step, 200 Mbit/s, 4 workers on 2 busy cores), 1 ms let 64-77 % of the rate through, 2 ms 81-91 %, 4 ms
# 99.5-99.9 %, and 6 ms no more; at 500 Mbit/s and 8 workers 1 ms 33 %, 4 ms 96-99 %.
_BURST_US = 4_000
# Two full Ethernet frames: below, a slow link never gets going.
_MIN_BURST_BYTES = 2 * 1514
# tc holds the length of a queue in 32 bits.
_MAX_QUEUE_BYTES = 2**32 - 1

_LAB_ID = re.compile(r"[a-z0-9]{1,12}")


@dataclasses.dataclass(frozen=True)
class Link:
    """Of one worker to the bridge, limited in both directions.

    Attributes:
      rate: bits per second.
      queue_us: how long a packet may wait before packets are dropped, in microseconds.
    """

    rate: int
    queue_us: int

    @property
    def burst_bytes(self) -> int:
        """What may leave at once after a pause."""
        return max(self.rate * _BURST_US // 8_000_000, _MIN_BURST_BYTES)


@dataclasses.dataclass(frozen=True)
class Worker:
    """One worker: its rank, its link, and what things are called that belong to it."""

    rank: int
    namespace: str
    address: str
    link: Link

    @property
    def port(self) -> str:
        """The bridge's end of the link; short, as interface names have at most 15 characters."""
        return f"w{self.rank}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A lab.

    Attributes:
      lab_id: makes the names unique.
      switch: the namespace of the bridge.
      workers: by rank.
      host_name: what the machine calls itself.
      congestion_control: of TCP in the workers' namespaces.
    """

    lab_id: str
    switch: str
    workers: tuple[Worker, ...]
    host_name: str
    congestion_control: str

    @property
    def namespaces(self) -> tuple[str, ...]:
        return (self.switch, *(worker.namespace for worker in self.workers))

    @property
    def coordinator(self) -> str:
        """Where worker 0 listens for `jax.distributed`."""
        return f"{self.workers[0].address}:{COORDINATOR_PORT}"


def make_plan(
    lab_id: str,
    num_workers: int,
    rate: str | Sequence[str],
    queue: str = "100ms",
    *,
    host_name: str = "localhost",
    congestion_control: str = "reno",
) -> Plan:
    """Lays out a lab.

    Args:
      lab_id: up to twelve small letters and digits.
      num_workers: N.
      rate: one rate for all links, or N of them, in a sequence or separated by commas.
      queue: how long packets may queue in front of a link.
      host_name: as in `Plan`.
      congestion_control: as in `Plan`.

    Raises:
      ValueError: names the argument, the value and what was expected.
    """
    if not _LAB_ID.fullmatch(lab_id):
        raise ValueError(f"lab_id={lab_id!r}: expected up to 12 small letters and digits")
    if not 1 <= num_workers <= MAX_WORKERS:
        raise ValueError(f"num_workers={num_workers}: expected 1 to {MAX_WORKERS}")
    texts = rate.split(",") if isinstance(rate, str) else list(rate)
    rates = [parse_rate(text) for text in texts]
    if len(rates) == 1:
        rates *= num_workers
    if len(rates) != num_workers:
        raise ValueError(
            f"rate={','.join(texts)!r}: {len(rates)} rates for {num_workers} workers; expected one for all, or one each"
        )
    queue_us = parse_duration(queue)
    if (fastest := max(rates)) * queue_us // 8_000_000 > _MAX_QUEUE_BYTES:
        raise ValueError(f"queue={queue!r}: more than 4 GiB at {fastest} bit/s; expected a shorter one")
    workers = tuple(
        Worker(rank, f"{PREFIX}{lab_id}-w{rank}", str(SUBNET[rank + 1]), Link(bits, queue_us))
        for rank, bits in enumerate(rates)
    )
    return Plan(lab_id, f"{PREFIX}{lab_id}-switch", workers, host_name, congestion_control)


def choose_congestion_control(allowed: str) -> str:
    """One that fills the links, of those that every namespace may use.

    In one stream, or two into one receiver, reno, cubic and bbr all reach the rate. In a ring, where each stream pauses
    after its slice, bbr, the default of some machines, fell to 87-90 % of it (4 workers, 200 Mbit/s) and 88-93 % (8
    workers, 500 Mbit/s), and reno and cubic had 95-100 %. So a lab does not inherit what the machine has.

    Args:
      allowed: as in /proc/sys/net/ipv4/tcp_allowed_congestion_control; often without cubic where bbr is the default.
        Reno is in every kernel.
    """
    return "cubic" if "cubic" in allowed.split() else "reno"
