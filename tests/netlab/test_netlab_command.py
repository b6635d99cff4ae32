"""`skipreduce lab` and `netlab.run` as far as they go without root."""

import os
import re
import subprocess

import pytest
from typer.testing import CliRunner

from jax_skipreduce import netlab
from jax_skipreduce.__main__ import make_app
from jax_skipreduce.programs.netlab import _command, _probe


def lab(*arguments):
    """Exit code and output, as one line of words without the lines of boxes."""
    result = CliRunner().invoke(make_app(), ["lab", *arguments], env={"COLUMNS": "200", "NO_COLOR": "1"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(re.sub(r"[^\x20-\x7e]+", " ", result.output).split())


@pytest.fixture
def without_root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    def refuse(*arguments, **_):
        raise AssertionError(f"ran {arguments}")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def test_dry_run_prints_a_shell_script_and_runs_nothing(without_root):
    arguments = ("--workers", "2", "--rate", "500mbit,100mbit", "--delay-queue", "20ms", "--dry-run")
    result = CliRunner().invoke(make_app(), ["lab", *arguments, "--", "python", "train.py", "--name", "a b"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0] == ("unshare --net --pid --mount --fork --kill-child --mount-proc sh -e <<'END_OF_LAB'")
    assert "tc -n w1 qdisc add dev eth0 root tbf rate 100mbit burst 50000b latency 20000us" in lines
    assert "tc -n switch qdisc add dev w1 root tbf rate 100mbit burst 50000b latency 20000us" in lines
    worker = next(line for line in lines if "SKIPREDUCE_LAB_RANK=1" in line)
    assert worker.endswith("ip netns exec w1 python train.py --name 'a b' &")
    assert lines[-2:] == ["wait", "END_OF_LAB"]


def test_options_after_the_command_belong_to_it(without_root):
    code, output = lab("--workers", "1", "--rate", "1gbit", "--dry-run", "python", "train.py", "--workers", "9")
    assert code == 0
    assert "ip netns exec w0 python train.py --workers 9 &" in output


def test_without_root_a_sentence_says_so(without_root):
    code, output = lab("--workers", "2", "--rate", "1gbit", "--", "true")
    assert code == 1
    assert output == "skipreduce lab: needs root to make network namespaces: run it with sudo (or see --dry-run)."
    with pytest.raises(netlab.LabError, match="skipreduce lab needs root"):
        netlab.run(["true"], num_workers=2, rate="1gbit")


@pytest.mark.parametrize(
    ("program", "package"),
    [
        *(("ip", "iproute2"), ("tc", "iproute2"), ("sysctl", "procps")),
        *(("setpriv", "util-linux"), ("unshare", "util-linux"), ("mount", r"util-linux (Debian: mount)")),
    ],
)
def test_without_a_program_a_sentence_says_so(monkeypatch, program, package):
    monkeypatch.setattr(_probe.shutil, "which", lambda name: None if name == program else f"/usr/bin/{name}")
    assert netlab.unavailable() == (
        f"skipreduce lab needs the program {program}, which is not in PATH: install {package}."
    )


@pytest.mark.parametrize(
    ("stdout", "stderr", "expected"),
    [
        ("", "unshare: unshare failed:\nOperation not permitted\n", "needs the permission to make namespaces"),
        ("\n", "Error: Specified qdisc\nkind is unknown.\n", "needs a bridge, veth and tc tbf"),
    ],
)
def test_what_is_not_allowed_or_not_in_the_kernel_is_quoted(monkeypatch, stdout, stderr, expected):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(_probe.shutil, "which", lambda name: f"/usr/bin/{name}")
    failed = subprocess.CompletedProcess([], 1, stdout, stderr)
    monkeypatch.setattr(_probe.subprocess, "run", lambda *_, **__: failed)
    reason = netlab.unavailable()
    assert reason.startswith(f"skipreduce lab {expected}")
    assert reason.endswith(": " + " ".join(stderr.split()))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workers", "3", "--rate", "1gbit,1gbit", "--", "true"), "--rate '1gbit,1gbit': 2 rates for 3 workers"),
        (("--workers", "3", "--rate", "500mbps", "--", "true"), "--rate '500mbps': tc reads mbps as bytes per second"),
        (("--workers", "0", "--rate", "1gbit", "--", "true"), "--workers 0: expected 1 to 1000"),
        (("--workers", "3", "--rate", "1gbit", "--delay-queue", "9", "--", "true"), "--delay-queue '9': expected"),
        (("--workers", "3", "--rate", "1gbit", "--timeout", "0", "--", "true"), "--timeout 0.0: expected"),
        (("--workers", "3", "--rate", "1gbit", "--output", "none", "--", "true"), "'none' is not one of"),
        (("--workers", "3", "--rate", "1gbit"), "Missing argument"),
    ],
)
def test_a_bad_option_is_named(without_root, arguments, message):
    code, output = lab(*arguments)
    assert code == 2
    assert message in output


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"command": []}, r"command=\[\]: expected the program and its arguments"),
        ({"command": "python train.py"}, r"command='python train.py': expected the program and its arguments"),
        ({"output": "none"}, "output='none': expected one of all, first, failed"),
        ({"timeout_s": -1}, "timeout_s=-1: expected a number of seconds"),
        ({"grace_s": -1}, "grace_s=-1: expected a number of seconds, 0 or more"),
        ({"rate": "1gbps"}, "rate='1gbps': tc reads gbps as bytes"),
    ],
)
def test_a_bad_argument_is_named(without_root, changes, message):
    arguments = {"command": ["true"], "num_workers": 2, "rate": "1gbit"} | changes
    with pytest.raises(ValueError, match=message):
        netlab.run(arguments.pop("command"), **arguments)


@pytest.mark.parametrize(
    ("error", "code"), [(netlab.LabError("ip link: no"), 1), (KeyboardInterrupt(), 130), (None, 7)]
)
def test_how_a_lab_ends_is_the_exit_status(monkeypatch, error, code):
    def run(command, **settings):
        assert command == ["train", "--fast"]
        assert settings == {"num_workers": 4, "rate": "1gbit", "queue": "100ms", "output": "failed", "timeout_s": 60.0}
        if error is not None:
            raise error
        return 7

    monkeypatch.setattr(_command, "run", run)
    arguments = ("--workers", "4", "--rate", "1gbit", "--output", "failed", "--timeout", "60")
    result, output = lab(*arguments, "--", "train", "--fast")
    assert result == code
    assert output == ("skipreduce lab: ip link: no" if code == 1 else "")
