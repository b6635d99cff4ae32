"""Whether all processes of a run have the same settings and tree: compared once, when the first step is traced.

Processes with another seed would add slices of other workers, and give wrong means without a word; with another
ratio or tree they would wait for each other for ever.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import threading
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jax_skipreduce import _ffi
from jax_skipreduce._ratio import ratios_of_leaves
from jax_skipreduce._reduction import Config
from jax_skipreduce._selection import leaf_paths, protected_leaves, treatments

_PREFIX = "skipreduce/configuration/"

# Steps at which schedules are compared.
_LOOKED_AT = (0, *(2**power for power in range(21)))

_lock = threading.Lock()
_is_published = False


def check_configuration(config: Config, grads: Any) -> None:
    """Compares `config` and the tree of `grads` with those of the other processes, in the first call of the process.

    Each process writes what it has into the key-value store of `jax.distributed`, and looks at what others have
    written. Nobody waits: the last to come sees all others, so that one raises at least, and its end ends the others.

    Raises:
      ValueError: another process has other settings or another tree.
    """
    global _is_published
    client = _store()
    with _lock:
        if _is_published or client is None or jax.process_count() == 1:
            return
        _is_published = True
    own = fingerprint(config, grads)
    client.key_value_set(f"{_PREFIX}{jax.process_index()}", json.dumps(own))
    for key, value in client.key_value_dir_get(_PREFIX):
        rank = key.rpartition("/")[2]
        if difference := first_difference(own, json.loads(value)):
            raise ValueError(
                f"processes {jax.process_index()} and {rank} do not do the same: {difference}. Start all with the same "
                "program, arguments and seeds"
            )


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
    with jax.ensure_compile_time_eval():
        values: list[Any] = [ratio(jnp.int32(count)) for count in _LOOKED_AT]
    return str([round(float(value), 6) for value in values])


def first_difference(own: dict[str, str], other: dict[str, str]) -> str | None:
    """In words, or None."""
    for name in {**own, **other}:
        here, there = own.get(name, "none"), other.get(name, "none")
        if here != there:
            return f"{name} is {here} on the first and {there} on the second"
    return None
