"""Compares settings and tree of all processes of a run, once, when the first step is traced.

Processes with different seeds would add slices of other workers, and give wrong means without a word. Processes with
different ratios or trees would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import threading
from typing import Any

import jax

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.selection import protected_leaves, treatments
from jax_skipreduce._transform.settings import Settings

_PREFIX = "skipreduce/configuration/"

_lock = threading.Lock()
_is_published = False


def check_configuration(settings: Settings, grads: Any) -> None:
    """Compares `settings` and the tree of `grads` with those of the other processes, in the first call of the process.

    The comparison is made only for a mesh of all devices: on smaller meshes, processes may well train different things.
    Each process writes its fingerprint into the key-value store of `jax.distributed`, and reads the fingerprints that
    are there. No process waits. The last one sees all others, so at least one process raises an error, and its end ends
    the other processes. Digests are compared; a process that finds a difference reads the texts.

    Args:
      settings: the settings of the transformation.
      grads: the gradients; stacked if `settings.mesh` is given.

    Raises:
      ValueError: another process has other settings or another tree.
    """
    global _is_published
    with _lock:
        if _is_published or not _is_of_all_processes(settings):
            return
        _is_published = True
    if settings.mesh is not None:
        grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), grads)
    own, rank = fingerprint(settings, grads), jax.process_index()
    text = json.dumps(own)
    digest = hashlib.sha256(text.encode()).hexdigest()
    client = _store()
    # A process that was started again finds its own old entry.
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


def _is_of_all_processes(settings: Settings) -> bool:
    """Whether all processes have to do the same."""
    if jax.process_count() == 1 or _store() is None or os.environ.get("SKIPREDUCE_CHECK_CONFIGURATION") == "0":
        return False
    mesh = settings.mesh
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if any(name not in mesh.manual_axes for name in settings.all_axes):
            return False  # simulated by vmap
    return mesh.size == jax.device_count()


def _store() -> Any:
    """The key-value store of the processes. JAX has no public name for it, and no public call that never waits."""
    from jax._src import distributed

    return distributed.global_state.client


def fingerprint(settings: Settings, grads: Any) -> dict[str, str]:
    """What has to be the same on all processes, by name."""
    own_version = importlib.import_module("jax_skipreduce").__version__
    described = {"jax_skipreduce": own_version, "jax": jax.__version__}
    for name in ("axis_name", "min_size", "bucket_bytes", "fast_axes"):
        described[name] = str(getattr(settings, name))
    of_all, of_leaves = settings.compressor.fingerprint(grads)
    described |= of_all
    # A function counts by what it returns.
    treated = treatments(grads, protected_leaves(grads, settings.protect), settings.min_size)
    for path, leaf, treatment, said in zip(leaf_paths(grads), jax.tree.leaves(grads), treated, of_leaves, strict=True):
        told = settings.compressor.treatment if treatment == "compressed" else treatment
        parts = (f"{leaf.dtype}{list(leaf.shape)}", told, said)
        described[f"gradient {path!r}"] = ", ".join(part for part in parts if part)
    return described


def first_difference(own: dict[str, str], other: dict[str, str]) -> str | None:
    """The first difference in words, or None."""
    for name in {**own, **other}:
        here, there = own.get(name, "none"), other.get(name, "none")
        if here != there:
            return f"{name} is {here} on the first and {there} on the second"
    return None
