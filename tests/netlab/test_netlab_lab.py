"""Real labs: what workers see, how they end, and that nothing is left. Needs root and network namespaces."""

import json
import os
import re
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
# The longest that a whole test may take: the machine may be busy.
PATIENCE_S = 300


@pytest.fixture(autouse=True)
def _needs_a_lab():
    if (reason := netlab.unavailable()) is not None:
        pytest.skip(reason)


# How a worker says which lab it is in: all processes of a lab, and no others, are in its process namespace.
SAY_LAB = "readlink /proc/self/ns/pid"


def lab_in(text):
    return re.search(r"pid:\[\d+\]", text)[0]


def processes_in(lab):
    """Command lines by process id."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                if str((path / "ns/pid").readlink()) == lab:
                    found[int(path.name)] = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # It has ended.
    return found


def wait_for(condition, what):
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0.05)
    return value


def lines_of(rank, text):
    return [line.removeprefix(f"[{rank}] ") for line in text.splitlines() if line.startswith(f"[{rank}] ")]


SEE = """
import json, os, socket, subprocess, sys
names = subprocess.run(["ip", "netns", "identify"], capture_output=True, text=True, check=True).stdout.split()
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
    "receives": rate("switch", "w" + rank),
    "lab": os.readlink("/proc/self/ns/pid"),
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
        assert worker["namespace"] == f"w{rank}"
        assert (worker["rank"], worker["num_workers"], worker["own"]) == (str(rank), "3", "yes")
        assert worker["coordinator"].startswith(seen[0]["addresses"][0] + ":")
        assert worker["addresses"] == [worker["name"]]
        # Different rates in different links, the same in both directions.
        assert worker["sends"] == worker["receives"] == [["tbf", rate, max(rate // 2000, 3028)]]
    assert len({worker["name"] for worker in seen.values()}) == 3
    (lab,) = {worker["lab"] for worker in seen.values()}
    assert processes_in(lab) == {}
    # The host never had the names.
    assert not Path("/var/run/netns/w0").exists()
    assert not Path("/etc/netns/w0").exists()


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
where = (own, "eth0") if rank == "1" else ("switch", "w0")
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


def stubborn(rest):
    """A worker that ignores SIGTERM and has a child in a session of its own; says where it is."""
    return ["sh", "-c", f"trap '' TERM; setsid sh -c 'sleep 1000; :' & {SAY_LAB}; {rest}"]


@pytest.mark.parametrize(
    ("end", "status", "how"),
    [("kill -KILL $$", 137, "was killed by SIGKILL"), ("exit 7", 7, "ended with status 7")],
)
def test_one_dies_and_all_end(capfd, end, status, how):
    script = f'if [ "$SKIPREDUCE_LAB_RANK" = 1 ]; then sleep 0.5; echo my last words >&2; {end}; fi; sleep 1000; :'
    assert netlab.run(stubborn(script), num_workers=3, rate="1gbit", grace_s=0.3) == status
    out, err = capfd.readouterr()
    assert f"skipreduce lab: worker 1 {how}; the others were ended. Its last lines:" in err
    assert "[1] my last words" in err.splitlines()
    assert processes_in(lab_in(out)) == {}


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


def test_the_time_is_over(capfd):
    assert netlab.run(stubborn("sleep 1000; :"), num_workers=2, rate="1gbit", timeout_s=1, grace_s=0.1) == 124
    out, err = capfd.readouterr()
    assert err == "skipreduce lab: not done after 1 seconds: all workers were ended\n"
    assert processes_in(lab_in(out)) == {}


def test_what_a_worker_leaves_behind_does_not_stay_as_a_zombie(capfd):
    script = "(sleep 0.1 &); sleep 0.5; grep -l '^State:.Z' /proc/[0-9]*/status; echo done"
    assert netlab.run(["sh", "-c", script], num_workers=1, rate="1gbit") == 0
    assert lines_of(0, capfd.readouterr().out) == ["done"]


def test_a_program_that_is_not_there(capfd):
    with pytest.raises(ValueError, match="command='no-such-program': no such program in PATH"):
        netlab.run(["no-such-program"], num_workers=2, rate="1gbit")


@pytest.mark.parametrize("number", [0, 2, 7, 12])
def test_an_error_while_building_is_quoted(monkeypatch, number):
    steps = list(_run.setup(_run.make_plan(3, "1gbit")))[:number]
    monkeypatch.setattr(_run, "setup", lambda _: [*steps, "echo the tape ran out >&2; exit 3", "echo not run >&2"])
    with pytest.raises(netlab.LabError, match=r"exit 3: the tape ran out$"):
        netlab.run(["true"], num_workers=3, rate="1gbit")


def test_a_signal_while_building_ends_the_lab_and_is_delivered_afterwards(monkeypatch, tmp_path):
    lab, later, delivered = tmp_path / "lab", tmp_path / "later", []
    monkeypatch.setattr(
        _run, "setup", lambda _: [f"{SAY_LAB} > {lab}.part; mv {lab}.part {lab}; sleep 1", f"touch {later}"]
    )

    def interrupt():
        wait_for(lab.exists, "the first step")
        os.kill(os.getpid(), signal.SIGTERM)

    def deliver(signum, _):
        delivered.append((signum, processes_in(lab_in(lab.read_text()))))

    previous = signal.signal(signal.SIGTERM, deliver)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        assert netlab.run(["true"], num_workers=3, rate="1gbit") == 128 + signal.SIGTERM
    finally:
        thread.join()
        signal.signal(signal.SIGTERM, previous)
    assert not later.exists()
    # The program gets the signal when nothing is left.
    assert delivered == [(signal.SIGTERM, {})]


# Whatever the test suite inherited: a shell that starts it in the background has SIGINT ignored, nohup has SIGHUP.
LAUNCHER = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
from jax_skipreduce.__main__ import main
main()
"""


def start_launcher(num_workers, command):
    """`skipreduce lab` as a process of its own."""
    lab = [sys.executable, "-c", LAUNCHER, "lab", "--workers", str(num_workers), "--rate", "1gbit"]
    return subprocess.Popen(
        [*lab, "--", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.fixture
def launcher():
    """A launcher once its workers run, and its lab."""
    process = start_launcher(2, stubborn("sleep 1000; :"))
    try:
        lab = lab_in(process.stdout.readline())
        # Two workers, each with its child.
        wait_for(lambda: sum("sleep" in words for words in processes_in(lab).values()) == 4, "the start of the workers")
        yield process, lab
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("signum", "status"),
    # Ctrl-C is an exit status; the others end the program the way they end all programs.
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
def test_a_signal_to_the_launcher_leaves_nothing(launcher, signum, status):
    process, lab = launcher
    process.send_signal(signum)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == status, err
    assert "Traceback" not in err
    assert processes_in(lab) == {}


def test_a_killed_launcher_leaves_nothing(launcher):
    process, lab = launcher
    process.kill()
    process.wait()
    # By the kernel: nobody waits for the grace of 2 s.
    wait_for(lambda: not processes_in(lab), "the end of the workers")


def test_a_killed_lab_is_an_error(launcher):
    process, lab = launcher
    (first,) = (pid for pid, words in processes_in(lab).items() if words[-2].endswith("_inside.py"))
    os.kill(first, signal.SIGKILL)
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, err
    assert "skipreduce lab: the first process of the lab ended with status" in err
    assert "Traceback" not in err
    assert processes_in(lab) == {}


def test_ctrl_c_reaches_the_launcher_alone():
    # A terminal sends it to the whole process group; workers are then ended in good order, by the launcher.
    script = f"trap 'echo interrupted' INT; trap 'echo ended; exit' TERM; {SAY_LAB}; while :; do sleep 0.05; done"
    with start_launcher(1, ["sh", "-c", script]) as process:
        try:
            lab = lab_in(process.stdout.readline())
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 130, err
    lines = lines_of(0, out)
    assert "ended" in lines
    assert "interrupted" not in lines
    assert processes_in(lab) == {}


CHATTERBOX = ["sh", "-c", f"{SAY_LAB}; while :; do echo chatter; done"]


def test_whoever_reads_the_output_may_stop_reading():
    with start_launcher(2, CHATTERBOX) as process:
        lab = lab_in(process.stdout.readline())
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 128 + signal.SIGPIPE, err
    assert err == ""
    assert processes_in(lab) == {}


def is_stuck(process):
    return "pipe_write" in Path(f"/proc/{process.pid}/wchan").read_text()


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_nobody_reads_leaves_nothing(signum):
    # The launcher waits in a write to a full pipe when the signal comes.
    with start_launcher(1, CHATTERBOX) as process:
        try:
            lab = lab_in(process.stdout.readline())
            wait_for(lambda: is_stuck(process), "a full pipe")
            process.send_signal(signum)
            assert process.wait(PATIENCE_S) == -signum
        finally:
            process.kill()
    wait_for(lambda: not processes_in(lab), "the end of the workers")


def test_two_labs_at_once(capfd, tmp_path):
    results, done = [], tmp_path / "done"
    script = f'{SAY_LAB}; while [ ! -e {done} ]; do sleep 0.05; done; echo "$SKIPREDUCE_LAB_RANK of the first"'
    first = threading.Thread(
        target=lambda: results.append(netlab.run(["sh", "-c", script], num_workers=2, rate="1gbit", output="all"))
    )
    out = ""
    first.start()
    try:

        def is_up():
            nonlocal out
            out += capfd.readouterr().out
            return out.count("pid:") == 2

        wait_for(is_up, "the first lab")
        lab = lab_in(out)
        assert netlab.run(["sh", "-c", f"ip netns identify; {SAY_LAB}"], num_workers=3, rate="100mbit") == 0
        # The same names, and nothing else in common.
        name, other = lines_of(0, capfd.readouterr().out)
        assert name == "w0"
        assert other != lab
        assert processes_in(other) == {}
        assert len(processes_in(lab)) >= 1 + 2
    finally:
        done.touch()
        first.join()
    assert results == [0]
    assert sorted(capfd.readouterr().out.splitlines()) == ["[0] 0 of the first", "[1] 1 of the first"]
    assert processes_in(lab) == {}


def test_the_script_of_a_dry_run_does_the_same():
    script = _run.dry_run(["sh", "-c", "ip netns identify; getent hosts w0 w1"], 2, "500mbit", "100ms")
    result = subprocess.run(["sh"], input="\n".join(script), capture_output=True, text=True, timeout=PATIENCE_S)
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(line.split()[0] for line in result.stdout.splitlines()) == sorted(
        [*("10.77.0.1", "10.77.0.2", "w0"), *("10.77.0.1", "10.77.0.2", "w1")]
    )


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
