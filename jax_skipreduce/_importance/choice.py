"""choose_protected(): from importance to the leaves that skipreduce reduces in full."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.selection import treatments
from jax_skipreduce._gradients.table import text_table
from jax_skipreduce._workers.renamed import renamed

_RANKED = ("protected", "skipped", "small")


# Attributes of Protection before version 0.2, and what to take.
_RENAMED = {
    "max_protected": "max_protected_ratio",
    "protected_fraction": "protected_ratio",
    "important_fraction": "important_ratio",
    "mask": "give the Protection itself as protect=",
    "save_figure": "the figure is drawn by examples/importance.py",
}


@dataclasses.dataclass(frozen=True)
class LeafImportance:
    """One gradient.

    Attributes:
      path: its keys, joined with ``/``.
      shape: the shape of the parameter.
      num_elements: the number of its elements.
      importance: the share of its elements that is important, in [0, 1]. Comparisons with ``==`` ignore it.
      treatment: ``"protected"``, ``"skipped"``, or why there was no choice: ``"small"``, ``"integer"``, ``"empty"``.
    """

    path: str
    shape: tuple[int, ...]
    num_elements: int
    importance: float = dataclasses.field(compare=False)
    treatment: str


@dataclasses.dataclass(frozen=True)
class Protection:
    """What `choose_protected` chose: a value for ``skipreduce(protect=..)`` that prints as a table.

    Two protections are equal if they protect the same leaves of the same parameters. As a static argument of a jitted
    function, a protection costs a compilation exactly when the choice changes.

    Attributes:
      leaves: one `LeafImportance` per leaf, in the order of the tree.
      max_protected_ratio: the share of the parameters that was allowed.
    """

    leaves: tuple[LeafImportance, ...]
    max_protected_ratio: float = dataclasses.field(compare=False)

    def __getattr__(self, name: str) -> Any:
        # Only what is not there comes here.
        if name in _RENAMED:
            raise AttributeError(f"Protection.{name}: since version 0.2, {_RENAMED[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the protected leaves."""
        return tuple(leaf.path for leaf in self.leaves if leaf.treatment == "protected")

    @property
    def protected_ratio(self) -> float:
        """The share of the parameters that is protected."""
        return self._sums("protected")[0] / (self._sums(*_RANKED)[0] or 1)

    @property
    def important_ratio(self) -> float:
        """The share of the important elements that lie in protected leaves."""
        return self._sums("protected")[1] / (self._sums(*_RANKED)[1] or 1)

    def _sums(self, *wanted: str) -> tuple[int, float]:
        """All elements, and the important elements, of the leaves with one of these treatments."""
        leaves = [leaf for leaf in self.leaves if leaf.treatment in wanted]
        return sum(x.num_elements for x in leaves), sum(x.importance * x.num_elements for x in leaves)

    def __call__(self, path: str, leaf: Any) -> bool:
        """Whether the leaf with this path is protected: the question that `skipreduce` asks."""
        del leaf
        if path not in {known.path for known in self.leaves}:
            raise ValueError(
                f"the gradient {path!r} was not among the parameters that sr.choose_protected was given: choose for "
                "the tree that is trained, or give protect=sr.by_path(..)"
            )
        return path in self.paths

    def __str__(self) -> str:
        whole, important = self._sums(*_RANKED)
        rows = []
        for leaf in self.leaves:
            is_ranked = leaf.treatment in _RANKED
            shares = [f"{leaf.num_elements / whole:.1%}", f"{leaf.importance:.1%}"] if is_ranked else ["", ""]
            rows.append([leaf.path, str(leaf.shape), leaf.treatment, f"{leaf.num_elements:,}", *shares])
        rows.append(["total", "", "", f"{whole:,}", "", f"{important / (whole or 1):.1%}"])
        table = text_table(["gradient", "shape", "treatment", "elements", "of all", "important"], rows, num_left=3)
        of_parameters = f"{self.protected_ratio:.1%} of the parameters (at most {self.max_protected_ratio:.1%})"
        chosen = f"{len(self.paths)} of {len(self.leaves)} leaves, {of_parameters}"
        return f"{table}\nProtected: {chosen}, {self.important_ratio:.1%} of the important elements."


@renamed(max_protected="max_protected_ratio")
def choose_protected(
    importance: Any, params: Any, max_protected_ratio: float = 0.05, *, min_size: int = 1024
) -> Protection:
    """Chooses the leaves that are worth reducing in full: many important elements in few parameters.

    After a first leaf, leaves are taken in the order of their importance (the smaller leaf first among equals) as far
    as the budget goes. Each leaf is tried as the first one. The choice that holds most important elements beyond the
    average of the tree wins. A leaf that is no more important than the whole tree is never chosen. `skipreduce` reduces
    leaves under `min_size` elements in full anyway, so small leaves take nothing of the budget. (SkipReduce, MICRO
    2025: 4.4.)

    Call the function outside of `jax.jit`: what is protected is settled when the step is traced, so **a choice that
    changes during the training costs one compilation of the step**. All workers need the same choice: give `importance`
    an `axis_name`, or global arrays.

    Args:
      importance: what `importance` returned for gradients of these parameters (or its average): a pytree of scalars.
      params: the parameters, or their shapes (`jax.eval_shape`).
      max_protected_ratio: the budget, in [0, 1]: a share of all float elements of `params`.
      min_size: as in `skipreduce`.

    Returns:
      A `Protection`, for ``skipreduce(protect=..)``.

    Raises:
      ValueError: the trees differ in structure, or a number is out of range (NaN: gradients were not finite).
      TypeError: an importance is traced or not a scalar, or an argument is not a number.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> params = {"conv": jnp.zeros((5, 8)), "dense": jnp.zeros((90, 10)), "head": jnp.zeros((6, 10))}
      >>> chosen = sr.choose_protected({"conv": 0.9, "dense": 0.2, "head": 0.55}, params, min_size=1)
      >>> chosen.paths, chosen.protected_ratio
      (('conv',), 0.04)
      >>> tx = sr.skipreduce("data", 0.5, protect=chosen)
    """
    for name, value, kinds, most, expected in (
        ("max_protected_ratio", max_protected_ratio, (int, float, np.number), 1, "a number in [0, 1], such as 0.05"),
        ("min_size", min_size, (int, np.integer), np.inf, "an int of 0 or more"),
    ):
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected {expected}")
        if not 0 <= value <= most:
            raise ValueError(f"{name}={value}: expected {expected}")
    shapes = jax.eval_shape(lambda tree: tree, params)
    given, expected = jax.tree.structure(importance), jax.tree.structure(shapes)
    if given != expected:
        raise ValueError(f"importance and params differ in structure: {given} and {expected}")
    paths, leaves = leaf_paths(shapes), jax.tree.leaves(shapes)
    shares = [_number(share, path) for path, share in zip(paths, jax.tree.leaves(importance), strict=True)]
    # The compressor of `skipreduce` skips, so compressed leaves are called skipped.
    treated = ["skipped" if how == "compressed" else how for how in treatments(shapes, [False] * len(leaves), min_size)]

    ranked = [i for i, treatment in enumerate(treated) if treatment in _RANKED]
    num_elements = sum(leaves[i].size for i in ranked)
    average = sum(shares[i] * leaves[i].size for i in ranked) / (num_elements or 1)
    # Tolerances absorb rounding in the budget and in the average.
    budget = max_protected_ratio * num_elements * (1 + 1e-12)
    candidates = [i for i in ranked if treated[i] == "skipped" and shares[i] > average * (1 + 1e-6)]
    sizes = {i: leaves[i].size for i in sorted(candidates, key=lambda i: (-shares[i], leaves[i].size, i))}
    for i in _choose(sizes, {i: size * (shares[i] - average) for i, size in sizes.items()}, budget):
        treated[i] = "protected"
    columns = paths, [leaf.shape for leaf in leaves], [leaf.size for leaf in leaves], shares, treated
    return Protection(tuple(map(LeafImportance, *columns)), float(max_protected_ratio))


def _number(share: Any, path: str) -> float:
    """The importance of one leaf, checked."""
    if isinstance(share, Tracer) or np.shape(share) != ():
        raise TypeError(
            f"the importance of {path!r} is {share!r}: expected a scalar, as from sr.importance. If it is traced, call "
            "sr.choose_protected outside of jax.jit: what is protected is settled when the step is traced"
        )
    # A mean of float32 shares may exceed 1 by its rounding.
    if not -1e-5 <= (value := float(share)) <= 1 + 1e-5:
        cause = ". sr.importance gives NaN where a gradient is NaN or infinite" if np.isnan(value) else ""
        raise ValueError(f"the importance of {path!r} is {value}: expected a share in [0, 1]{cause}")
    return min(max(value, 0.0), 1.0)


def _choose(sizes: dict[int, int], gains: dict[int, float], budget: float) -> set[int]:
    """The leaves to protect. `sizes` has the leaves in the order of their importance."""

    def filled(first: int) -> set[int]:
        left, taken = budget, set()
        for i in (first, *sizes):
            if i not in taken and sizes[i] <= left:
                taken.add(i)
                left -= sizes[i]
        return taken

    # The most important leaf may be tiny, and leave no room for a leaf that is almost as important and far larger.
    # Sums are compared in float32, so that no difference by rounding decides.
    return max(map(filled, sizes), key=lambda taken: np.float32(sum(gains[i] for i in taken)), default=set())
