"""Real labs: what workers see, how they end, and that nothing is left. Needs root and network namespaces."""

import fcntl
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jax_skipreduce import netlab
from jax_skipreduce.programs.netlab import _run

pytestmark = pytest.mark.netlab

ROOT = Path(__file__).parent.parent.parent
# Of a whole test: the machine may be busy.
PATIENCE_S = 300


@pytest.fixture(autouse=True)
def _needs_a_lab():
    if (reason := netlab.unavailable()) is not None:
        pytest.skip(reason)


@pytest.fixture
def token():
    """In the command line of every process of a test, by which it is found again."""
    return f"token-{secrets.token_hex(8)}"


def processes_with(token):
    """Command lines by process id; zombies have none."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal() and int(path.name) != os.getpid():
            try:
                words = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if any(token in word for word in words):
                found[int(path.name)] = words
    return found


def what_is_left(lab_id):
    """Other labs may be up at the same time, so only that of this one."""
    return [
        str(path)
        for folder, pattern in (
            ("/run/netns", f"skipreduce-{lab_id}-*"),
            ("/etc/netns", f"skipreduce-{lab_id}-*"),
            ("/run/skipreduce", f"{lab_id}.lab"),
        )
        for path in Path(folder).glob(pattern)
    ]


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)
    return value


def lab_id_in(text):
    return re.search(r"skipreduce-([0-9a-f]+)-w\d", text)[1]


def lines_of(rank, text):
    return [line.removeprefix(f"[{rank}] ") for line in text.splitlines() if line.startswith(f"[{rank}] ")]


SEE = """
import json, os, socket, subprocess, sys
names = subprocess.run(["ip", "netns", "identify"], capture_output=True, text=True, check=True).stdout.split()
switch = names[0].rpartition("-")[0] + "-switch"
rank = os.environ["SKIPREDUCE_LAB_RANK"]
def rate(namespace, device):
    command = ["tc", "-n", namespace, "-j", "qdisc", "show", "dev", device]
    qdiscs = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return [(q["kind"], q["options"]["rate"] * 8, q["options"]["burst"]) for q in qdiscs]
links = json.loads(subprocess.run(["ip", "-j", "-4", "addr"], capture_output=True, text=True, check=True).stdout)
print(json.dumps({
    "namespace": names[0],
    "rank": rank,
    "num_workers": os.environ["SKIPREDUCE_LAB_NUM_WORKERS"],
    "coordinator": os.environ["SKIPREDUCE_LAB_COORDINATOR"],
    "name": socket.gethostbyname(socket.gethostname()),
    "addresses": [a["local"] for link in links if link["ifname"] != "lo" for a in link["addr_info"]],
    "sends": rate(names[0], "eth0"),
    "receives": rate(switch, "w" + rank),
    "own": os.environ["OWN"],
}))
"""


def test_what_a_worker_sees(capfd):
    rates = [500_000_000, 8_000_000, 1_000_000_000]
    status = netlab.run(
        [sys.executable, "-c", SEE],
        num_workers=3,
        rate=[f"{rate // 10**6}mbit" for rate in rates],
        env={"OWN": "yes"},
        output="all",
    )
    out, err = capfd.readouterr()
    assert status == 0, out + err
    seen = {rank: json.loads(lines_of(rank, out)[0]) for rank in range(3)}
    for rank, rate in enumerate(rates):
        worker = seen[rank]
        assert worker["namespace"].endswith(f"-w{rank}")
        assert (worker["rank"], worker["num_workers"], worker["own"]) == (str(rank), "3", "yes")
        assert worker["coordinator"].startswith(seen[0]["addresses"][0] + ":")
        assert worker["addresses"] == [worker["name"]]
        # Different rates in different links, the same in both directions.
        assert worker["sends"] == worker["receives"] == [["tbf", rate, max(rate // 2000, 3028)]]
    assert len({worker["name"] for worker in seen.values()}) == 3
    assert what_is_left(lab_id_in(out)) == []


SEND = """
import json, os, socket, subprocess
rank = os.environ["SKIPREDUCE_LAB_RANK"]
if rank == "0":
    listener = socket.create_server(("0.0.0.0", 5000))
    open(os.environ["READY"], "w").close()
    connection, received = listener.accept()[0], 0
    while data := connection.recv(2**16):
        received += len(data)
    connection.close()
    print(received)
else:
    while not os.path.exists(os.environ["READY"]):
        pass
    with socket.create_connection(("w0", 5000)) as connection:
        connection.sendall(bytes(2**20))
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
own = subprocess.run(["ip", "netns", "identify"], capture_output=True, text=True, check=True).stdout.strip()
where = (own, "eth0") if rank == "1" else (own.rpartition("-")[0] + "-switch", "w0")
tc = ["tc", "-n", where[0], "-s", "-j", "qdisc", "show", "dev", where[1]]
(qdisc,) = json.loads(subprocess.run(tc, capture_output=True, text=True, check=True).stdout)
print(json.dumps({name: qdisc[name] for name in ("bytes", "overlimits")}))
"""


@pytest.mark.parametrize(("rate", "slow"), [("8mbit,800mbit", "receiver"), ("800mbit,8mbit", "sender")])
def test_what_is_sent_and_what_is_received_is_limited(capfd, tmp_path, rate, slow):
    environment = {"READY": str(tmp_path / "ready")}
    status = netlab.run([sys.executable, "-c", SEND], num_workers=2, rate=rate, env=environment, output="all")
    out, err = capfd.readouterr()
    assert status == 0, out + err
    received, at_bridge = lines_of(0, out)
    (at_sender,) = lines_of(1, out)
    assert received == str(2**20)
    counters = {"receiver": json.loads(at_bridge), "sender": json.loads(at_sender)}
    # All of it went through both limits, and packets had to wait at the slower one.
    assert all(counter["bytes"] >= 2**20 for counter in counters.values())
    assert counters[slow]["overlimits"] > 0


PSUM = """
from jax_skipreduce import netlab
netlab.initialize(timeout_s=250)
netlab.initialize()
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
n = jax.process_count()
mesh = jax.make_mesh((n,), ("data",), axis_types=(AxisType.Auto,))
sharding = NamedSharding(mesh, P("data"))
x = jax.make_array_from_callback((n, 1000), sharding, lambda index: jnp.full((1, 1000), 2.0 ** jax.process_index()))
total = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))(x)
print("sum", float(total[0, 0]), "devices", jax.device_count(), jax.local_device_count())
jax.distributed.shutdown()
"""


def test_jax_over_a_lab(capfd):
    environment = {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PSUM]
    status = netlab.run(command, num_workers=2, rate="1gbit", env=environment, output="all", timeout_s=PATIENCE_S)
    out, err = capfd.readouterr()
    assert status == 0, out + err
    for rank in range(2):
        assert "sum 3.0 devices 2 1" in lines_of(rank, out)


def test_no_line_is_lost_and_order_is_kept(capfd):
    program = (
        "import sys\n"
        "for number in range(20000):\n"
        "    print(number, 'x' * 60, file=(sys.stdout, sys.stderr)[number % 2])\n"
        "print('no end of line', end='')\n"
    )
    status = netlab.run([sys.executable, "-c", program], num_workers=3, rate="1gbit", output="all")
    out, err = capfd.readouterr()
    assert status == 0, err
    expected = [f"{number} {'x' * 60}" for number in range(20000)] + ["no end of line"]
    for rank in range(3):
        assert lines_of(rank, out) == expected


def test_what_is_written_at_the_very_end_is_not_lost(capfd):
    # Much more than is read at once, and the worker has gone before it is read.
    program = (
        "import fcntl, os\n"
        "fcntl.fcntl(1, fcntl.F_SETPIPE_SZ, 2**20)\n"
        "os.write(1, b''.join(b'%07d\\n' % number for number in range(2**17)))\n"
        "os._exit(0)\n"
    )
    assert netlab.run([sys.executable, "-c", program], num_workers=2, rate="1gbit", output="all") == 0
    out = capfd.readouterr().out
    for rank in range(2):
        assert lines_of(rank, out) == [f"{number:07d}" for number in range(2**17)]


@pytest.mark.parametrize(("output", "shown"), [("all", {0, 1}), ("first", {0}), ("failed", set())])
def test_whose_output_is_shown(capfd, output, shown):
    assert netlab.run(["echo", "hello"], num_workers=2, rate="1gbit", output=output) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == [f"[{rank}] hello" for rank in sorted(shown)]
    assert err == ""


def test_a_worker_that_ends_well_ends_nobody_else(capfd):
    # Rank 1 has long gone when rank 0 is done.
    script = 'if [ "$SKIPREDUCE_LAB_RANK" = 0 ]; then sleep 1; echo done; fi'
    assert netlab.run(["sh", "-c", script], num_workers=2, rate="1gbit") == 0
    assert capfd.readouterr().out == "[0] done\n"


def stubborn(token, rest):
    """A worker that ignores SIGTERM and has a child in a session of its own; says where it is."""
    # The token goes where a shell keeps $0, which changes nothing.
    return ["sh", "-c", f"trap '' TERM; setsid sh -c 'sleep 1000; :' {token} & ip netns identify; {rest}", token]


@pytest.mark.parametrize(
    ("end", "status", "how"),
    [("kill -KILL $$", 137, "was killed by SIGKILL"), ("exit 7", 7, "ended with status 7")],
)
def test_one_dies_and_all_end(capfd, token, end, status, how):
    script = f'if [ "$SKIPREDUCE_LAB_RANK" = 1 ]; then sleep 0.5; echo my last words >&2; {end}; fi; sleep 1000; :'
    assert netlab.run(stubborn(token, script), num_workers=3, rate="1gbit", grace_s=0.3) == status
    out, err = capfd.readouterr()
    assert f"skipreduce lab: worker 1 {how}; the others were ended. Its last lines:" in err
    assert "[1] my last words" in err.splitlines()
    assert what_is_left(lab_id_in(out)) == []
    assert processes_with(token) == {}


def test_last_lines_are_not_shown_twice(capfd):
    assert netlab.run(["sh", "-c", "echo hello; exit 3"], num_workers=1, rate="1gbit") == 3
    out, err = capfd.readouterr()
    assert out == "[0] hello\n"
    assert err == "skipreduce lab: worker 0 ended with status 3; the others were ended\n"


def test_workers_may_say_something_when_they_are_ended(capfd):
    script = (
        'if [ "$SKIPREDUCE_LAB_RANK" = 0 ]; then trap "echo saved; exit 0" TERM; sleep 1000 & wait; '
        "else sleep 0.5; exit 9; fi"
    )
    assert netlab.run(["sh", "-c", script], num_workers=2, rate="1gbit", grace_s=60) == 9
    assert lines_of(0, capfd.readouterr().out) == ["saved"]


def test_the_time_is_over(capfd, token):
    assert netlab.run(stubborn(token, "sleep 1000; :"), num_workers=2, rate="1gbit", timeout_s=1, grace_s=0.1) == 124
    out, err = capfd.readouterr()
    assert err == "skipreduce lab: not done after 1 seconds: all workers were ended\n"
    assert what_is_left(lab_id_in(out)) == []
    assert processes_with(token) == {}


def test_a_program_that_is_not_there(capfd):
    with pytest.raises(ValueError, match="command='no-such-program': no such program in PATH"):
        netlab.run(["no-such-program"], num_workers=2, rate="1gbit")


@pytest.mark.parametrize("number", [0, 2, 7, 12])
def test_an_error_while_building_leaves_nothing(monkeypatch, number):
    steps, execute = [], _run.execute

    def fail(step):
        steps.append(step)
        if len(steps) > number:
            raise netlab.LabError("the tape ran out")
        execute(step)

    monkeypatch.setattr(_run, "execute", fail)
    with pytest.raises(netlab.LabError, match="the tape ran out"):
        netlab.run(["true"], num_workers=3, rate="1gbit")
    assert len(steps) == number + 1
    assert what_is_left(re.search(r"skipreduce-([0-9a-f]+)-", str(steps[0]))[1]) == []


def test_a_signal_while_building_leaves_nothing(monkeypatch):
    steps, execute, delivered = [], _run.execute, []

    def interrupt(step):
        steps.append(step)
        execute(step)
        if len(steps) == 8:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(_run, "execute", interrupt)

    def deliver(signum, _):
        lab_id = re.search(r"skipreduce-([0-9a-f]+)-", str(steps[0]))[1]
        delivered.append((signum, what_is_left(lab_id)))

    previous = signal.signal(signal.SIGTERM, deliver)
    try:
        assert netlab.run(["true"], num_workers=3, rate="1gbit") == 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert len(steps) == 8
    # The program gets the signal when nothing is left.
    assert delivered == [(signal.SIGTERM, [])]


def start_launcher(num_workers, command):
    """`skipreduce lab` as a process of its own."""
    lab = [sys.executable, "-m", "jax_skipreduce", "lab", "--workers", str(num_workers), "--rate", "1gbit"]
    return subprocess.Popen(
        [*lab, "--", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def launcher(token):
    """A launcher once its workers run, and the lab's id."""
    process = start_launcher(2, stubborn(token, "sleep 1000; :"))
    try:
        lab_id = lab_id_in(process.stdout.readline())
        # Two workers, each with its child.
        wait_for(lambda: len(of_the_workers(token)) == 4, "the start of the workers")
        yield process, lab_id
    finally:
        process.kill()
        process.communicate()


def of_the_workers(token):
    return {pid for pid, words in processes_with(token).items() if "jax_skipreduce" not in words and "ip" not in words}


@pytest.mark.parametrize(
    ("signum", "status"),
    # Ctrl-C is an exit status; the others end the program the way they end all programs.
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
def test_a_signal_to_the_launcher_leaves_nothing(launcher, token, signum, status):
    process, lab_id = launcher
    process.send_signal(signum)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert what_is_left(lab_id) == []
    assert processes_with(token) == {}


def test_ctrl_c_reaches_the_launcher_alone(token):
    # A terminal sends it to the whole process group; workers are then ended in good order, by the launcher.
    script = (
        "trap 'echo interrupted' INT; trap 'echo ended; exit' TERM; ip netns identify; while :; do sleep 0.05; done"
    )
    with start_launcher(1, ["sh", "-c", script, token]) as process:
        lab_id = lab_id_in(process.stdout.readline())
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, err
    lines = lines_of(0, out)
    assert "ended" in lines
    assert "interrupted" not in lines
    assert what_is_left(lab_id) == []


def chatterbox(token):
    return ["sh", "-c", 'ip netns identify; while :; do echo "$0"; done', token]


def test_whoever_reads_the_output_may_stop_reading(token):
    with start_launcher(2, chatterbox(token)) as process:
        lab_id = lab_id_in(process.stdout.readline())
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE, err
    assert err == ""
    assert what_is_left(lab_id) == []
    assert processes_with(token) == {}


def test_a_signal_while_nobody_reads_leaves_nothing(token):
    # The launcher waits in a write to a full pipe when the signal comes.
    with start_launcher(1, chatterbox(token)) as process:
        try:
            lab_id = lab_id_in(process.stdout.readline())
            wait_for(lambda: "pipe_write" in Path(f"/proc/{process.pid}/wchan").read_text(), "a full pipe")
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == -signal.SIGTERM
        finally:
            process.kill()
    assert what_is_left(lab_id) == []
    assert processes_with(token) == {}


def test_leftovers_of_a_killed_launcher_are_removed_and_nothing_else(launcher, token, capfd):
    process, lab_id = launcher
    # Not ours, though its name looks like it: it has no record.
    foreign = f"skipreduce-{secrets.token_hex(3)}-w0"
    bridge = f"br{secrets.token_hex(4)}"
    subprocess.run(["ip", "netns", "add", foreign], check=True)
    subprocess.run(["ip", "link", "add", "name", bridge, "type", "bridge"], check=True)
    guest = subprocess.Popen(["ip", "netns", "exec", foreign, "sleep", "1000"])
    try:
        # No other lab may start meanwhile, and remove the leftovers before we have seen them.
        with Path("/run/skipreduce/lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            process.kill()
            process.wait()
            # The kernel ends the workers themselves; their children are left, and the namespaces.
            wait_for(lambda: len(of_the_workers(token)) == 2, "the end of the workers")
            assert len(what_is_left(lab_id)) == 3 + 2 + 1
        assert netlab.run(["true"], num_workers=1, rate="1gbit") == 0
        assert what_is_left(lab_id) == []
        assert processes_with(token) == {}

        assert guest.poll() is None
        assert Path("/run/netns", foreign).exists()
        assert Path("/sys/class/net", bridge).exists()
    finally:
        guest.kill()
        guest.wait()
        subprocess.run(["ip", "link", "del", bridge], check=True)
        subprocess.run(["ip", "netns", "del", foreign], check=True)


def test_two_labs_at_once(capfd, tmp_path):
    results, done = [], tmp_path / "done"
    script = f'ip netns identify; while [ ! -e {done} ]; do sleep 0.05; done; echo "$SKIPREDUCE_LAB_RANK of the first"'
    first = threading.Thread(
        target=lambda: results.append(netlab.run(["sh", "-c", script], num_workers=2, rate="1gbit", output="all"))
    )
    out = ""
    first.start()
    try:

        def is_up():
            nonlocal out
            out += capfd.readouterr().out
            return len(set(re.findall(r"skipreduce-[0-9a-f]+-w\d", out))) == 2

        wait_for(is_up, "the first lab")
        lab_id = lab_id_in(out)
        before = what_is_left(lab_id)
        assert len(before) == 3 + 2 + 1
        assert netlab.run(["sh", "-c", "ip netns identify"], num_workers=3, rate="100mbit") == 0
        assert lab_id_in(capfd.readouterr().out) != lab_id
        assert what_is_left(lab_id) == before
    finally:
        done.touch()
        first.join()
    assert results == [0]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 of the first", "[1] 1 of the first"]
    assert what_is_left(lab_id) == []


def test_hosts_of_several_devices():
    """Two hosts with four devices each: everyone sends its part of the gradient, and means are right."""
    command = [sys.executable, str(ROOT / "examples" / "hierarchical.py"), "--rounds", "1", "--mebibytes", "1"]
    result = subprocess.run(
        [sys.executable, "-m", "jax_skipreduce", "lab", "--workers", "2", "--rate", "500mbit", "--", *command],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "2 hosts x 4, half skipped" in result.stdout
