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

import jax_skipreduce as sr
from jax_skipreduce import SkipReduce
from jax_skipreduce._checks import processes
from jax_skipreduce._checks.processes import first_difference, is_of_all_processes
from jax_skipreduce._transform.configuration import fingerprint
from tests.multiprocess.test_gloo import free_port

ROOT = Path(__file__).parent.parent.parent


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
def test_a_difference_is_named_by_one_process_at_least():
    (first, code), (second, other_code) = run_two("seed")
    assert code != 0
    assert other_code != 0
    both = first + second
    assert "done" not in both
    line = next(text for text in both.splitlines() if text.startswith("ValueError: processes "))
    assert re.search(r"processes \d and \d do not do the same: seed is", line), line


@pytest.mark.multiprocess
def test_the_same_settings_are_fine():
    assert [(output.splitlines()[-1], code) for output, code in run_two("nothing")] == [("done", 0)] * 2


class Store:
    """The key-value store of `jax.distributed`, as far as it is used."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        return [(key, value) for key, value in self.values.items() if key.startswith(prefix)]

    def key_value_try_get(self, key):
        return self.values[key]


@pytest.fixture
def trace_as(monkeypatch):
    """A function of (rank, settings, size): what process `rank` of two does when it traces its first step."""
    store = Store()
    monkeypatch.setattr(processes, "_store", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)

    def trace(rank, settings, size=2000):
        settings = dict(settings)
        monkeypatch.setattr(jax, "process_index", lambda: rank)
        monkeypatch.setattr(processes, "_published", set())
        every = settings.pop("check_every", None)
        tx = sr.skipreduce("data", **{"skip_ratio": 0.5, **settings})
        if every is not None:
            tx = optax.chain(tx, sr.check_every(every, "data"))
        step = jax.shard_map(
            lambda g: tx.update(g, tx.init(g), g)[0],
            mesh=jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)),
            in_specs=P("data"),
            out_specs=P(),
        )
        jax.eval_shape(step, {"w": jnp.zeros(8 * size)})

    return trace


def warm_up(until):
    return {"skip_ratio": lambda count: jnp.where(count < until, 0.0, 0.5)}


DIFFERENCES = {
    "seed": ({"seed": 0}, {"seed": 7}, 2000, r"seed is 7 on the first and 0 on the second"),
    "ratio": ({}, {"skip_ratio": 0.0}, 2000, r"gradient 'w' is float32\[2000\], skipped, skip_ratio 0 on the first"),
    "schedule": (warm_up(10), warm_up(5), 2000, r"gradient 'w' is float32\[2000\], skipped, skip_ratio 0, "),
    "check_every": ({"check_every": 3}, {"check_every": 4}, 2000, r"check_every is 4 steps over .* and 3 steps"),
    "tree": ({}, {}, 3000, r"gradient 'w' is float32\[3000\].* on the first and float32\[2000\]"),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_a_difference_is_named_by_the_last_to_come(trace_as, what):
    first, second, size, message = DIFFERENCES[what]
    trace_as(0, first)
    with pytest.raises(ValueError, match=f"processes 1 and 0 do not do the same: {message}"):
        trace_as(1, second, size)
    # One that is started again with what the first one has is fine, and finds nothing of its former self.
    trace_as(1, first)
    trace_as(0, first)


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
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "_store", object)
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    assert is_of_all_processes(mesh, ("data",))
    seen = []

    def step(x):
        seen.append(is_of_all_processes(None, ("data",)))
        return x

    jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(jnp.zeros(3))
    jax.vmap(step, axis_name="data")(jnp.zeros(3))
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(jnp.zeros(4))
    monkeypatch.setattr(jax, "device_count", lambda: 4)
    monkeypatch.setenv("SKIPREDUCE_CHECK_CONFIGURATION", "0")
    jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())(jnp.zeros(5))
    assert seen == [True, False, False, False]
