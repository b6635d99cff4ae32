"""The key paths of leaves, as users write them."""

from __future__ import annotations

import collections
from typing import Any

import jax


def leaf_paths(tree: Any) -> list[str]:
    """The key path of each leaf, as users write it: ``encoder/layers/0/kernel``.

    Flax NNX keeps each array in a variable's attribute ``value``, and unwraps the array before optax sees it.
    The path is the same in both forms: a last ``value`` that is the only child of its parent is left out.
    """
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    parents = collections.Counter(path[:-1] for path in paths)
    value = jax.tree_util.GetAttrKey("value")
    short = [path[:-1] if len(path) > 1 and path[-1] == value and parents[path[:-1]] == 1 else path for path in paths]
    return [jax.tree_util.keystr(path, simple=True, separator="/") or "(root)" for path in short]
