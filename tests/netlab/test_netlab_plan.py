"""Rates, names, addresses and the commands that follow from them: no root needed."""

import ipaddress
import re
import shlex

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_skipreduce.programs.netlab._plan import Link, choose_congestion_control, make_plan
from jax_skipreduce.programs.netlab._script import hosts, inside, script, setup
from jax_skipreduce.programs.netlab._units import format_rate, parse_duration, parse_rate

BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


@hypothesis.given(st.integers(1, 10**14))
def test_rates_survive_being_written(rate):
    assert parse_rate(format_rate(rate)) == rate


@hypothesis.given(st.integers(1, 10**4), st.integers(0, 999), st.sampled_from(["kbit", "mbit", "gbit", "tbit"]))
def test_rates_may_have_a_fraction(whole, thousandths, unit):
    text = f"{whole}.{thousandths:03d}{unit.upper()}"
    assert parse_rate(text) == whole * BITS[unit] + thousandths * BITS[unit] // 1000


@pytest.mark.parametrize("unit", ["bps", "kbps", "mbps", "gbps", "Mbps"])
def test_bytes_per_second_are_refused_with_a_hint(unit):
    with pytest.raises(ValueError, match=rf"rate='20{unit}': tc reads .* as bytes per second; write 20[kmg]?bit "):
        parse_rate(f"20{unit}")


@pytest.mark.parametrize(
    "text", ["", "fast", "500", "-1mbit", "mbit", "1e3mbit", "5mbits", "5 m bit", "0mbit", "0.1bit"]
)
def test_what_is_no_rate_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"rate={text!r}: ")):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "expected"), [("100ms", 100_000), ("1.5 s", 1_500_000), ("20us", 20), ("2secs", 2_000_000)]
)
def test_durations(text, expected):
    assert parse_duration(text) == expected


@pytest.mark.parametrize("text", ["", "100", "-1ms", "1min", "0ms", "ms"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError, match=re.escape(f"queue={text!r}: ")):
        parse_duration(text)


@hypothesis.given(st.integers(1, 10**12))
def test_a_burst_is_4_ms_of_the_rate_but_two_packets_at_least(rate):
    burst = Link(rate, 100_000).burst_bytes
    assert burst >= 2 * 1514
    assert burst == 2 * 1514 or abs(burst - rate * 0.004 / 8) <= 1


@hypothesis.given(st.integers(1, 1000))
def test_names_and_addresses_are_unique_and_valid(num_workers):
    plan = make_plan(num_workers, "1gbit")
    assert [worker.rank for worker in plan.workers] == list(range(num_workers))
    assert len({worker.name for worker in plan.workers}) == num_workers
    # The kernel's limit for names of interfaces.
    assert all(len(worker.name) <= 15 for worker in plan.workers)
    addresses = {ipaddress.ip_address(worker.address) for worker in plan.workers}
    assert len(addresses) == num_workers
    network = ipaddress.ip_network("10.77.0.0/16")
    assert all(address in network for address in addresses)
    assert not addresses & {network.network_address, network.broadcast_address}
    assert plan.coordinator.startswith(plan.workers[0].address + ":")


def test_one_rate_is_for_all_and_n_are_one_each():
    assert {worker.link for worker in make_plan(3, "500mbit", "10ms").workers} == {Link(500_000_000, 10_000)}
    for rate in ("500mbit,1gbit, 100mbit", ["500mbit", "1gbit", "100mbit"]):
        rates = [worker.link.rate for worker in make_plan(3, rate).workers]
        assert rates == [500_000_000, 1_000_000_000, 100_000_000]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rate": "1gbit,1gbit"}, "rate='1gbit,1gbit': 2 rates for 3 workers; expected one for all, or one each"),
        ({"rate": []}, "rate='': 0 rates for 3 workers"),
        ({"rate": "1gbit,,1gbit"}, "rate='': expected a number and bit"),
        ({"num_workers": 0}, "num_workers=0: expected 1 to 1000"),
        ({"num_workers": 1001}, "num_workers=1001: expected 1 to 1000"),
        ({"queue": "10"}, "queue='10': expected a number and us, ms or s"),
        ({"queue": "100s"}, "queue='100s': more than 4 GiB"),
    ],
)
def test_a_bad_plan_names_argument_and_value(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(**({"num_workers": 3, "rate": "1gbit", "queue": "100ms"} | changes))


def commands(plan):
    return [shlex.split(line) for line in setup(plan)]


def test_links_are_limited_in_both_directions():
    plan = make_plan(2, "500mbit,8mbit", "50ms")
    for worker, rate, burst in zip(plan.workers, ("500mbit", "8mbit"), ("250000b", "4000b"), strict=True):
        tbf = ["root", "tbf", "rate", rate, "burst", burst, "latency", "50000us"]
        # What it sends,
        assert ["tc", "-n", worker.name, "qdisc", "add", "dev", "eth0", *tbf] in commands(plan)
        # and what it receives.
        assert ["tc", "-n", "switch", "qdisc", "add", "dev", worker.name, *tbf] in commands(plan)


def test_names_of_namespaces_are_private_before_the_first_is_added():
    lines = list(setup(make_plan(2, "1gbit")))
    first = next(index for index, line in enumerate(lines) if line.startswith("ip "))
    assert {line.split()[-1] for line in lines[:first] if line.startswith("mount ")} == {
        "/var/run/netns",
        "/etc/netns",
    }
    assert not any(line.startswith("mount ") for line in lines[first:])


def test_the_machine_s_name_is_the_worker_s_own_address():
    plan = make_plan(3, "1gbit", host_name="box")
    for worker in plan.workers:
        entries = dict(reversed(line.split()) for line in hosts(plan, worker.rank))
        assert entries == {
            "localhost": "127.0.0.1",
            "box": worker.address,
            **{f"w{other.rank}": other.address for other in plan.workers},
        }
    # A machine without a name of its own must not lose 127.0.0.1.
    assert "".join(hosts(make_plan(1, "1gbit", host_name="localhost"), 0)).count("localhost") == 1


def test_words_of_the_user_are_quoted():
    plan = make_plan(1, "1gbit", host_name="a$b")
    lines = list(script(plan, ["echo", "a b", "$c"], [{"NAME": "it's"}]))
    assert shlex.split(next(line for line in lines if line.startswith("NAME="))) == [
        *("NAME=it's", *inside(plan.workers[0], ["echo", "a b", "$c"]), "&"),
    ]
    assert "printf '%s\\n' '127.0.0.1 localhost' '10.77.0.1 a$b' '10.77.0.1 w0' > /etc/netns/w0/hosts" in lines


@pytest.mark.parametrize(("allowed", "expected"), [("reno bbr\n", "reno"), ("reno cubic\n", "cubic"), ("", "reno")])
def test_congestion_control(allowed, expected):
    assert choose_congestion_control(allowed) == expected
    plan = make_plan(1, "1gbit", congestion_control=expected)
    assert any(f"net.ipv4.tcp_congestion_control={expected}" in argv for argv in commands(plan))
