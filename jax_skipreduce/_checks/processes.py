"""Whether all processes of a run do the same: compared once, when the first step is traced."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax

_lock = threading.Lock()
_published: set[str] = set()


def compare_once(topic: str, describe: Callable[[], dict[str, str]], mesh: Any, names: Sequence[Any]) -> None:
    """Compares what this process does with what the others do, in the first call of the process for this topic.

    The comparison is made only for a mesh of all devices: on smaller meshes, processes may well train different things.
    Each process writes its fingerprint into the key-value store of `jax.distributed`, and reads the fingerprints that
    are there. No process waits. The last one sees all others, so at least one process raises an error, and its end ends
    the other processes. Digests are compared; a process that finds a difference reads the texts.

    Args:
      topic: what is compared.
      describe: gives what has to be the same on all processes, by name.
      mesh: the mesh of a pjit program; None inside of a shard_map.
      names: the data axes.

    Raises:
      ValueError: another process does something else.
    """
    with _lock:
        if topic in _published or not is_of_all_processes(mesh, names):
            return
        _published.add(topic)
    own, rank = describe(), jax.process_index()
    text, prefix = json.dumps(own), f"skipreduce/{topic}/"
    digest = hashlib.sha256(text.encode()).hexdigest()
    client = _store()
    # A process that was started again finds its own old entry.
    client.key_value_set(f"{prefix}text/{rank}", text, allow_overwrite=True)
    client.key_value_set(f"{prefix}digest/{rank}", digest, allow_overwrite=True)
    for key, other in client.key_value_dir_get(f"{prefix}digest/"):
        if other == digest:
            continue
        name = key.rpartition("/")[2]
        theirs = json.loads(client.key_value_try_get(f"{prefix}text/{name}"))
        if difference := first_difference(own, theirs):
            raise ValueError(
                f"processes {rank} and {name} do not do the same: {difference}. Start all with the same program, "
                "arguments and seeds. (If they are to differ: SKIPREDUCE_CHECK_CONFIGURATION=0)"
            )


def is_of_all_processes(mesh: Any, names: Sequence[Any]) -> bool:
    """Whether all processes have to do the same."""
    if jax.process_count() == 1 or _store() is None or os.environ.get("SKIPREDUCE_CHECK_CONFIGURATION") == "0":
        return False
    if mesh is None:
        mesh = jax.sharding.get_abstract_mesh()
        if any(name not in mesh.manual_axes for name in names):
            return False  # simulated by vmap
    return mesh.size == jax.device_count()


def _store() -> Any:
    """The key-value store of the processes. JAX has no public name for it, and no public call that never waits."""
    from jax._src import distributed

    return distributed.global_state.client


def first_difference(own: dict[str, str], other: dict[str, str]) -> str | None:
    """The first difference in words, or None."""
    for name in {**own, **other}:
        here, there = own.get(name, "none"), other.get(name, "none")
        if here != there:
            return f"{name} is {here} on the first and {there} on the second"
    return None
