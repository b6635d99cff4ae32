"""Processes that were started with other settings end, and say which."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jax_skipreduce import SkipReduce
from jax_skipreduce._transform import configuration as _configuration
from jax_skipreduce._transform.configuration import _is_of_all_processes, fingerprint, first_difference
from tests.multiprocess.test_gloo import free_port

ROOT = Path(__file__).parent.parent.parent

DIFFERENCES = {
    "seed": r"seed is",
    "ratio": r"gradient 'w' is float32\[2000\], skipped, skip_ratio 0",
    "schedule": r"gradient 'w' is float32\[2000\], skipped, skip_ratio 0, ",
    "tree": r"gradient 'w' is float32\[(2000|3000)\]",
}


def run_two(what):
    """Return codes and output of both processes."""
    port = free_port()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.multiprocess.differing_worker", str(port), str(rank), what],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        deadline = time.monotonic() + 100
        while all(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
            time.sleep(0.05)
        if any(worker.returncode for worker in workers):
            # What a launcher does: one has failed, so the others are ended.
            for worker in workers:
                worker.terminate()
        return [(worker.communicate(timeout=100)[0], worker.returncode) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


@pytest.mark.multiprocess
@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_named_by_one_process_at_least(what):
    (first, code), (second, other_code) = run_two(what)
    assert code != 0
    assert other_code != 0
    both = first + second
    assert "done" not in both
    line = next(text for text in both.splitlines() if text.startswith("ValueError: processes "))
    assert re.search(rf"processes \d and \d do not do the same: {DIFFERENCES[what]}", line), line


@pytest.mark.multiprocess
def test_the_same_settings_are_fine():
    assert [(output.splitlines()[-1], code) for output, code in run_two("nothing")] == [("done", 0)] * 2


def test_fingerprints():
    grads = {"w": jnp.zeros(2000), "b": jnp.zeros(3)}
    one = fingerprint(SkipReduce("data", lambda count: 0.5).settings, grads)
    assert "gradient 'b' is float32[3], small, skip_ratio 0.5, 0.5," in str(
        first_difference(one, fingerprint(SkipReduce("data", 0.25).settings, grads))
    )
    protected = fingerprint(SkipReduce("data", lambda count: 0.5, protect=lambda path, leaf: True).settings, grads)
    assert "gradient 'b' is float32[3], small" in str(first_difference(one, protected))
    assert "float32[2000], protected" in protected["gradient 'w'"]
    assert one == fingerprint(SkipReduce("data", lambda count: 0.25 + 0.25).settings, grads)
    assert first_difference(one, one) is None
    assert "gradient 'b' is float32[3], small" in str(first_difference(one, {**one, "gradient 'b'": "?"}))
    assert first_difference(one, {k: v for k, v in one.items() if k != "seed"}) == (
        "seed is 0 on the first and none on the second"
    )
    assert first_difference({}, {"more": "1"}) == "more is none on the first and 1 on the second"


@pytest.mark.parametrize("ratio", [optax.linear_schedule(0.0, 0.5, 10), lambda count: jnp.where(count < 3, 0.0, 0.5)])
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_schedules_are_looked_at_inside_of_any_mesh(ratio, axis_type):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    found = []

    def step(x):
        found.append(fingerprint(SkipReduce("data", ratio).settings, {"w": x}))
        return x

    with jax.set_mesh(mesh):
        jax.jit(jax.shard_map(step, in_specs=P(), out_specs=P()))(jnp.zeros(2000))
    assert found == [fingerprint(SkipReduce("data", ratio).settings, {"w": jnp.zeros(2000)})]


def test_who_is_compared(monkeypatch):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    config = SkipReduce("data", 0.5).settings
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(_configuration, "_store", object)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert _is_of_all_processes(SkipReduce("data", 0.5, mesh=mesh).settings)
    seen = []

    def step(x):
        seen.append(_is_of_all_processes(config))
        return x

    jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(jnp.zeros(3))
    jax.vmap(step, axis_name="data")(jnp.zeros(3))
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(jnp.zeros(4))
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setenv("SKIPREDUCE_CHECK_CONFIGURATION", "0")
    jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(jnp.zeros(5))
    assert seen == [True, False, False, False]
