"""Whether all processes of a run have the same settings and tree: compared once, when the first step is traced.

Processes with another seed would add slices of other workers, and give wrong means without a word; with another
ratio or tree they would wait for each other for ever.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_skipreduce._backends import ffi as _ffi
from jax_skipreduce._gradients.ratio import ratios_of_leaves
from jax_skipreduce._gradients.selection import leaf_paths, protected_leaves, treatments
from jax_skipreduce._transform.step import Config
from jax_skipreduce._workers.axes import outside_of_the_trace

_PREFIX = "skipreduce/configuration/"

# Steps at which schedules are compared.
_LOOKED_AT = (0, *(2**power for power in range(21)))

_lock = threading.Lock()
_is_published = False


def check_configuration(config: Config, mesh: Any, grads: Any) -> None:
    """Compares `config` and the tree of `grads` with those of the other processes, in the first call of the process.

    Only for a mesh of all devices: on a smaller one, processes may well train something else each. Each process writes
    what it has into the key-value store of `jax.distributed`, and looks at what others have written. Nobody waits:
    the last to come sees all others, so that one raises at least, and its end ends the others. Digests are compared;
    texts are read by a process that finds a difference.

    Args:
      config: the settings.
      mesh: of a pjit program, where `grads` are stacked; None inside of a shard_map.
      grads: the gradients.

    Raises:
      ValueError: another process has other settings or another tree.
    """
    global _is_published
    with _lock:
        if _is_published or not _is_of_all_processes(config, mesh):
            return
        _is_published = True
    if mesh is not None:
        grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), grads)
    own, rank = fingerprint(config, grads), jax.process_index()
    text = json.dumps(own)
    digest = hashlib.sha256(text.encode()).hexdigest()
    client = _store()
    # A process that was started again has written already.
    client.key_value_set(f"{_PREFIX}text/{rank}", text, allow_overwrite=True)
    client.key_value_set(f"{_PREFIX}digest/{rank}", digest, allow_overwrite=True)
    for key, other in client.key_value_dir_get(f"{_PREFIX}digest/"):
        if other == digest:
            continue
        name = key.rpartition("/")[2]
        theirs = json.loads(client.key_value_try_get(f"{_PREFIX}text/{name}"))
        if difference := first_difference(own, theirs):
            raise ValueError(
                f"processes {rank} and {name} do not do the same: {difference}. Start all with the same program, "
                "arguments and seeds. (If they are to differ: SKIPREDUCE_CHECK_CONFIGURATION=0)"
            )


def _is_of_all_processes(config: Config, mesh: Any) -> bool:
    """Whether all processes have to do the same."""
    if jax.process_count() == 1 or _store() is None or os.environ.get("SKIPREDUCE_CHECK_CONFIGURATION") == "0":
        return False
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if any(name not in mesh.manual_axes for name in config.all_axes):
            return False  # simulated by vmap
    return mesh.size == jax.device_count()


def _store() -> Any:
    """The key-value store that the processes share. JAX has no public name for it, nor for anything without a wait."""
    from jax._src import distributed

    return distributed.global_state.client


def fingerprint(config: Config, grads: Any) -> dict[str, str]:
    """What has to be the same on all processes, by name."""
    own_version = importlib.import_module("jax_skipreduce").__version__
    described = {"jax_skipreduce": own_version, "jax": jax.__version__}
    for field in dataclasses.fields(config):
        if field.name not in ("skip_ratio", "protect", "backend"):
            described[field.name] = str(getattr(config, field.name))
    described["backend"] = _ffi.chosen_backend(config.backend)
    # What is given as a function counts by what it says.
    treated = treatments(grads, protected_leaves(grads, config.protect), config.min_size)
    ratios = ratios_of_leaves(config.skip_ratio, grads)
    shown = {id(ratio): ratio for ratio in ratios}
    shown = {key: _shown(ratio) for key, ratio in shown.items()}
    for path, leaf, treatment, ratio in zip(leaf_paths(grads), jax.tree.leaves(grads), treated, ratios, strict=True):
        described[f"gradient {path!r}"] = f"{leaf.dtype}{list(leaf.shape)}, {treatment}, skip_ratio {shown[id(ratio)]}"
    return described


def _shown(ratio: Any) -> str:
    if isinstance(ratio, Tracer):
        return "traced"
    if not callable(ratio):
        return f"{float(ratio):g}"
    values: list[Any] = outside_of_the_trace(lambda: [ratio(jnp.int32(count)) for count in _LOOKED_AT])
    # Processors of different types may differ in the last digits.
    return ", ".join(f"{float(value):.4g}" for value in values)


def first_difference(own: dict[str, str], other: dict[str, str]) -> str | None:
    """In words, or None."""
    for name in {**own, **other}:
        here, there = own.get(name, "none"), other.get(name, "none")
        if here != there:
            return f"{name} is {here} on the first and {there} on the second"
    return None
