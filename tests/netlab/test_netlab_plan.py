"""Rates, names, addresses and the commands that follow from them: no root needed."""

import ipaddress
import re
import shlex

import hypothesis
import pytest
from hypothesis import strategies as st

from jax_skipreduce.programs.netlab import _owner
from jax_skipreduce.programs.netlab._commands import Command, File, hosts, setup, teardown
from jax_skipreduce.programs.netlab._plan import Link, choose_congestion_control, make_plan
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
    plan = make_plan("0a1b2c", num_workers, "1gbit")
    assert [worker.rank for worker in plan.workers] == list(range(num_workers))
    assert len(set(plan.namespaces)) == num_workers + 1
    assert all(name.startswith("skipreduce-0a1b2c-") for name in plan.namespaces)
    # The kernel's limit for names of interfaces.
    assert len({worker.port for worker in plan.workers}) == num_workers
    assert all(len(worker.port) <= 15 for worker in plan.workers)
    addresses = {ipaddress.ip_address(worker.address) for worker in plan.workers}
    assert len(addresses) == num_workers
    network = ipaddress.ip_network("10.77.0.0/16")
    assert all(address in network for address in addresses)
    assert not addresses & {network.network_address, network.broadcast_address}
    assert plan.coordinator.startswith(plan.workers[0].address + ":")


def test_one_rate_is_for_all_and_n_are_one_each():
    assert {worker.link for worker in make_plan("x", 3, "500mbit", "10ms").workers} == {Link(500_000_000, 10_000)}
    for rate in ("500mbit,1gbit, 100mbit", ["500mbit", "1gbit", "100mbit"]):
        rates = [worker.link.rate for worker in make_plan("x", 3, rate).workers]
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
        ({"lab_id": "../x"}, "lab_id='../x': expected"),
    ],
)
def test_a_bad_plan_names_argument_and_value(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_plan(**({"lab_id": "x", "num_workers": 3, "rate": "1gbit", "queue": "100ms"} | changes))


def commands(plan):
    return [step.argv for step in setup(plan) if isinstance(step, Command)]


def test_links_are_limited_in_both_directions():
    plan = make_plan("x", 2, "500mbit,8mbit", "50ms")
    limits = {argv[2]: argv for argv in commands(plan) if argv[0] == "tc" and argv[2] != plan.switch}
    for worker, rate, burst in zip(plan.workers, ("500mbit", "8mbit"), ("250000b", "4000b"), strict=True):
        tbf = ("root", "tbf", "rate", rate, "burst", burst, "latency", "50000us")
        # What it sends,
        assert limits[worker.namespace] == ("tc", "-n", worker.namespace, "qdisc", "add", "dev", "eth0", *tbf)
        # and what it receives.
        assert ("tc", "-n", plan.switch, "qdisc", "add", "dev", worker.port, *tbf) in commands(plan)


def test_nothing_is_made_in_the_host_s_own_namespace():
    plan = make_plan("x", 5, "1gbit")
    for argv in commands(plan):
        assert argv[0] in ("ip", "tc")
        is_inside = argv[1] == "-n" and argv[2] in plan.namespaces
        is_namespace = argv[1:3] in (("netns", "add"), ("netns", "exec")) and argv[3] in plan.namespaces
        # Both ends of a veth pair have a namespace.
        is_link = argv[1:3] == ("link", "add") and sum(word in plan.namespaces for word in argv) == 2
        assert is_inside or is_namespace or is_link, argv


def test_all_that_is_made_is_removed():
    plan = make_plan("x", 5, "1gbit")
    made = {argv[3] for argv in commands(plan) if argv[:3] == ("ip", "netns", "add")}
    removed = {step.argv[3] for step in teardown(plan.namespaces) if step.argv[:3] == ("ip", "netns", "del")}
    assert made == removed == set(plan.namespaces)
    folders = {str(step.path.parent) for step in setup(plan) if isinstance(step, File)}
    assert folders <= {step.argv[2] for step in teardown(plan.namespaces) if step.argv[0] == "rm"}
    assert len(folders) == 5


def test_the_machine_s_name_is_the_worker_s_own_address():
    plan = make_plan("x", 3, "1gbit", host_name="box")
    for worker in plan.workers:
        entries = dict(reversed(line.split()) for line in hosts(plan, worker.rank).splitlines())
        assert entries == {
            "localhost": "127.0.0.1",
            "box": worker.address,
            **{f"w{other.rank}": other.address for other in plan.workers},
        }
    # A machine without a name of its own must not lose 127.0.0.1.
    assert hosts(make_plan("x", 1, "1gbit", host_name="localhost"), 0).count("localhost") == 1


def test_steps_are_printed_as_a_shell_reads_them():
    assert shlex.split(str(Command(("ip", "a b", "$c")))) == ["ip", "a b", "$c"]
    file = next(step for step in setup(make_plan("x", 1, "1gbit", host_name="box")) if isinstance(step, File))
    assert str(file) == (
        "mkdir -p /etc/netns/skipreduce-x-w0 && printf '%s\\n' '127.0.0.1 localhost' '10.77.0.1 box' '10.77.0.1 w0' "
        "> /etc/netns/skipreduce-x-w0/hosts"
    )


@pytest.mark.parametrize(("allowed", "expected"), [("reno bbr\n", "reno"), ("reno cubic\n", "cubic"), ("", "reno")])
def test_congestion_control(allowed, expected):
    assert choose_congestion_control(allowed) == expected
    plan = make_plan("x", 1, "1gbit", congestion_control=expected)
    assert any(f"net.ipv4.tcp_congestion_control={expected}" in argv for argv in commands(plan))


def test_a_record_that_vanishes_while_leftovers_are_looked_for(tmp_path, monkeypatch):
    # A lab that ends removes its record at any time. A link to nowhere is seen in the folder, and cannot be opened.
    monkeypatch.setattr(_owner, "RECORDS", tmp_path)
    (tmp_path / "gone.lab").symlink_to(tmp_path / "nowhere")
    with _owner.owned_lab() as lab_id:
        assert (tmp_path / f"{lab_id}.lab").exists()
    assert not (tmp_path / f"{lab_id}.lab").exists()
