"""The worker's side: its environment, the errors of `initialize`, and how workers meet."""

import ast
import os
import socket
import sys
import threading
from pathlib import Path

import pytest

import jax_skipreduce.programs.netlab
from jax_skipreduce import netlab
from jax_skipreduce.programs.netlab import _worker
from jax_skipreduce.programs.netlab._plan import make_plan
from jax_skipreduce.programs.netlab._rendezvous import meet

LAB = {"SKIPREDUCE_LAB_COORDINATOR": "10.0.0.1:29400", "SKIPREDUCE_LAB_NUM_WORKERS": "3", "SKIPREDUCE_LAB_RANK": "2"}


@pytest.fixture
def in_a_lab(monkeypatch):
    for name, value in LAB.items():
        monkeypatch.setenv(name, value)


def test_public_names():
    names = ["LabError", "dry_run", "initialize", "is_worker", "read_environment", "run", "unavailable"]
    assert sorted(netlab.__all__) == names
    assert all(hasattr(netlab, name) for name in netlab.__all__)


def test_only_the_standard_library_is_imported():
    for path in Path(jax_skipreduce.programs.netlab.__file__).parent.glob("*.py"):
        names = set()
        # What a function imports is imported when it is called.
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(".".join((node.module or "").split(".")[:3]))
        others = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
        allowed = {"_command": {"jax_skipreduce.programs.netlab", "typer"}, "_inside": set()}
        assert others <= allowed.get(path.stem, {"jax_skipreduce.programs.netlab"}), path


def test_environment():
    plan = make_plan(3, "1gbit")
    inherited = {
        "HOME": "/h",
        "http_proxy": "http://p",
        "HTTPS_PROXY": "http://p",
        "NPROC": "4",
        "SKIPREDUCE_LAB_RANK": "7",
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=2",
        "XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b=2",
    }
    env = _worker.environment(plan, 1, inherited, {"EXTRA": "yes", "HOME": "/other"})
    assert env == {
        "SKIPREDUCE_LAB_COORDINATOR": "10.77.0.1:29400",
        "SKIPREDUCE_LAB_NUM_WORKERS": "3",
        "SKIPREDUCE_LAB_RANK": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "NPROC": "4",
        "PYTHONUNBUFFERED": "1",
        "GLIBC_TUNABLES": "glibc.malloc.arena_max=2",
        "XLA_FLAGS": "--xla_a=1 --xla_b=2",
        "EXTRA": "yes",
        "HOME": "/other",
    }
    defaults = _worker.environment(plan, 0, {}, {})
    assert defaults["NPROC"] == "16"
    assert "glibc.malloc.mmap_threshold=4294967295" in defaults["GLIBC_TUNABLES"]
    assert inherited["http_proxy"] == "http://p"


def test_what_the_launcher_writes_is_what_a_worker_reads(in_a_lab):
    plan = make_plan(3, "1gbit")
    for rank in range(3):
        env = _worker.environment(plan, rank, {}, {})
        assert _worker.read_environment(env) == (plan.coordinator, 3, rank)
    assert netlab.is_worker()


def test_outside_of_a_lab(monkeypatch):
    for name in LAB:
        monkeypatch.delenv(name, raising=False)
    assert not netlab.is_worker()
    with pytest.raises(RuntimeError, match=r"SKIPREDUCE_LAB_COORDINATOR.*start the program with `skipreduce lab"):
        netlab.initialize()


def test_half_a_lab_is_none(in_a_lab, monkeypatch):
    monkeypatch.delenv("SKIPREDUCE_LAB_RANK")
    assert not netlab.is_worker()
    with pytest.raises(RuntimeError, match=r"of a lab, and SKIPREDUCE_LAB_RANK are not set"):
        netlab.initialize()


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("SKIPREDUCE_LAB_COORDINATOR", "10.0.0.1", "host:port"),
        ("SKIPREDUCE_LAB_COORDINATOR", "10.0.0.1:http", "host:port"),
        ("SKIPREDUCE_LAB_COORDINATOR", "10.0.0.1:70000", "host:port"),
        ("SKIPREDUCE_LAB_NUM_WORKERS", "0", "a number from 1 on"),
        ("SKIPREDUCE_LAB_NUM_WORKERS", "two", "a number from 1 on"),
        ("SKIPREDUCE_LAB_RANK", "3", "a number from 0 to 2"),
        ("SKIPREDUCE_LAB_RANK", "-1", "a number from 0 to 2"),
    ],
)
def test_a_bad_variable_is_named(in_a_lab, monkeypatch, name, value, expected):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}='{value}': expected {expected}"):
        netlab.initialize()


def test_a_bad_timeout_is_named(in_a_lab):
    with pytest.raises(ValueError, match="timeout_s=0: expected at least one second"):
        netlab.initialize(timeout_s=0)
    with pytest.raises(ValueError, match="num_devices=0: expected at least one"):
        netlab.initialize(num_devices=0)


def free_address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()


def meet_in_threads(ranks, num_workers, timeout_s):
    """What each got: None, or an error."""
    address, results = free_address(), {}

    def one(rank):
        try:
            results[rank] = meet(address, num_workers, rank, timeout_s)
        except OSError as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("num_workers", [1, 2, 5])
def test_all_meet(num_workers):
    # Worker 0 last, so that the others have to wait for it.
    ranks = [*range(1, num_workers), 0]
    assert meet_in_threads(ranks, num_workers, 60) == dict.fromkeys(range(num_workers))


def test_who_does_not_come_is_named():
    results = meet_in_threads([0, 2, 4], 5, 1)
    assert isinstance(results[0], TimeoutError)
    assert str(results[0]) == "of 5 workers, 1, 3 did not come within 1 s"
    for rank in (2, 4):
        assert isinstance(results[rank], OSError)
        assert "worker 0" in str(results[rank])


def test_worker_0_does_not_come():
    results = meet_in_threads([1], 2, 1)
    assert isinstance(results[1], TimeoutError)
    assert str(results[1]).startswith("worker 0 did not come to 127.0.0.1:")


def test_initialize_says_which_worker_it_was(in_a_lab, monkeypatch):
    def fail(*_):
        raise TimeoutError("worker 0 did not come")

    monkeypatch.setattr(_worker, "meet", fail)
    monkeypatch.setattr("jax.config.update", lambda *_: None)
    with pytest.raises(RuntimeError, match=r"netlab\.initialize\(\), worker 2 of 3: worker 0 did not come"):
        netlab.initialize()
    assert "SKIPREDUCE_LAB_RANK" in os.environ
