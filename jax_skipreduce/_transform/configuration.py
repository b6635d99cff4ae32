"""Compares settings and tree of all processes of a run, once, when the first step is traced.

Processes with different seeds would add slices of other workers, and give wrong means without a word. Processes with
different ratios or trees would wait for each other for ever.
"""

from __future__ import annotations

import importlib
from typing import Any

import jax

from jax_skipreduce._checks.processes import compare_once
from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.selection import protected_leaves, treatments
from jax_skipreduce._transform.settings import Settings


def check_configuration(settings: Settings, grads: Any) -> None:
    """Compares `settings` and the tree of `grads` with those of the other processes; see `compare_once`.

    Args:
      settings: the settings of the transformation.
      grads: the gradients; stacked if `settings.mesh` is given.

    Raises:
      ValueError: another process has other settings or another tree.
    """
    if settings.mesh is not None:
        grads = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), grads)
    compare_once("configuration", lambda: fingerprint(settings, grads), settings.mesh, settings.all_axes)


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
