"""What a lab consists of: names, addresses and links. Plain data; nothing here touches the machine."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence

from jax_skipreduce.programs.netlab._units import parse_duration, parse_rate

# The bridge is in a namespace too. So no address, interface or firewall rule of the host can collide with a lab, and
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


@dataclasses.dataclass(frozen=True)
class Link:
    """The link of one worker to the bridge, limited in both directions.

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
    """One worker: its rank, its address and its link."""

    rank: int
    address: str
    link: Link

    @property
    def name(self) -> str:
        """The name of its namespace, of the bridge's end of its link, and of its host."""
        return f"w{self.rank}"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A lab.

    Attributes:
      workers: by rank.
      host_name: what the machine calls itself.
      congestion_control: what TCP uses in the workers' namespaces.
    """

    workers: tuple[Worker, ...]
    host_name: str
    congestion_control: str

    @property
    def coordinator(self) -> str:
        """Where worker 0 listens for `jax.distributed`."""
        return f"{self.workers[0].address}:{COORDINATOR_PORT}"


def make_plan(
    num_workers: int,
    rate: str | Sequence[str],
    queue: str = "100ms",
    *,
    host_name: str = "localhost",
    congestion_control: str = "reno",
) -> Plan:
    """Lays out a lab.

    Args:
      num_workers: N.
      rate: one rate for all links, or N of them, in a sequence or separated by commas.
      queue: how long packets may queue in front of a link.
      host_name: as in `Plan`.
      congestion_control: as in `Plan`.

    Raises:
      ValueError: names the argument, the value and what was expected.
    """
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
    workers = tuple(Worker(rank, str(SUBNET[rank + 1]), Link(bits, queue_us)) for rank, bits in enumerate(rates))
    return Plan(workers, host_name, congestion_control)


def choose_congestion_control(allowed: str) -> str:
    """Chooses the congestion control that fills the links, among those that every namespace may use.

    With one stream, or two into one receiver, reno, cubic and bbr all reach the rate. In a ring, each stream pauses
    after its slice. There bbr, the default of some machines, fell to 87-90 % of the rate (4 workers, 200 Mbit/s) and
    88-93 % (8 workers, 500 Mbit/s), and reno and cubic reached 95-100 %. A lab thus ignores the machine's default.

    Args:
      allowed: the text of /proc/sys/net/ipv4/tcp_allowed_congestion_control. It often lacks cubic where bbr is the
        default. Reno is in every kernel.
    """
    return "cubic" if "cubic" in allowed.split() else "reno"
