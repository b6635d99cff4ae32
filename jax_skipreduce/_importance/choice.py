"""choose_protected(): from importance to the leaves that skipreduce reduces in full."""

from __future__ import annotations

import dataclasses
import importlib
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.selection import Treatment, treatments


@dataclasses.dataclass(frozen=True)
class LeafImportance:
    """One gradient.

    Attributes:
      path: its keys, joined with ``/``.
      shape: of the parameter.
      num_elements: elements of it.
      importance: the share of them that is important, in [0, 1].
      treatment: ``"protected"``, ``"skipped"``, or why there was nothing to choose: ``"small"``, ``"integer"``,
        ``"empty"``.
    """

    path: str
    shape: tuple[int, ...]
    num_elements: int
    importance: float
    treatment: Treatment

    @property
    def num_important(self) -> float:
        """Elements that are important; no whole number after averaging."""
        return self.importance * self.num_elements


@dataclasses.dataclass(frozen=True, eq=False)
class Protection:
    """What `choose_protected` chose. It is a value for ``skipreduce(protect=..)``, and prints as a table.

    Two are equal if they protect the same leaves. So a jitted function that takes one as a static argument compiles
    again if the choice changes, and only then.

    Attributes:
      leaves: one `LeafImportance` per leaf, in the order of the tree.
      max_protected: the share of the parameters that was allowed.
      treedef: structure of the parameters.
    """

    leaves: tuple[LeafImportance, ...]
    max_protected: float
    treedef: Any

    @property
    def paths(self) -> tuple[str, ...]:
        """Of the protected leaves."""
        return tuple(leaf.path for leaf in self.leaves if leaf.treatment == "protected")

    @property
    def mask(self) -> Any:
        """A pytree of bools with the structure of the parameters: True where protected."""
        return jax.tree.unflatten(self.treedef, [leaf.treatment == "protected" for leaf in self.leaves])

    @property
    def protected_fraction(self) -> float:
        """The share of the parameters that is protected."""
        return _ratio(sum(leaf.num_elements for leaf in self._of("protected")), self._num_elements)

    @property
    def important_fraction(self) -> float:
        """The share of the important elements that lie in protected leaves."""
        ranked = self._of("protected", "skipped", "small")
        return _ratio(sum(leaf.num_important for leaf in self._of("protected")), sum(x.num_important for x in ranked))

    @property
    def _num_elements(self) -> int:
        return sum(leaf.num_elements for leaf in self._of("protected", "skipped", "small"))

    def _of(self, *wanted: Treatment) -> list[LeafImportance]:
        return [leaf for leaf in self.leaves if leaf.treatment in wanted]

    def __call__(self, path: str, leaf: Any) -> bool:
        """Whether the leaf with this path is protected: what `skipreduce` asks.

        Raises:
          ValueError: there was no such leaf when the choice was made.
        """
        del leaf
        for known in self.leaves:
            if known.path == path:
                return known.treatment == "protected"
        raise ValueError(
            f"the gradient {path!r} was not among the parameters that sr.choose_protected was given: choose for the "
            "tree that is trained, or give protect=sr.by_path(..)"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Protection):
            return NotImplemented
        return self.treedef == other.treedef and self.paths == other.paths

    def __hash__(self) -> int:
        return hash((self.treedef, self.paths))

    def save_figure(self, path: str | Path) -> None:
        """Writes a picture as the paper's Fig. 9: the size of each layer and how much of it is important.

        Args:
          path: of the file; its ending says the format, such as ``.png``.

        Raises:
          ModuleNotFoundError: matplotlib is not installed.
          ValueError: the ending is not one that matplotlib can write.
          OSError: the file cannot be written.
        """
        try:
            # Where it is used, because the library does not need matplotlib.
            figure = importlib.import_module("jax_skipreduce._importance.figure")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"{error}: the picture needs matplotlib, pip install matplotlib (or 'jax-skipreduce[demo]')"
            ) from None
        ranked = self._of("protected", "skipped", "small")
        figure.save_figure(
            [(leaf.path, leaf.num_elements, leaf.importance, leaf.treatment) for leaf in ranked], self._summary(), path
        )

    def __str__(self) -> str:
        header = ("gradient", "shape", "treatment", "elements", "of all", "important")
        whole = self._num_elements
        rows = [
            (
                *(leaf.path, str(leaf.shape), leaf.treatment, f"{leaf.num_elements:,}"),
                f"{_ratio(leaf.num_elements, whole):.1%}",
                f"{leaf.importance:.1%}",
            )
            if leaf.treatment not in ("integer", "empty")
            else (leaf.path, str(leaf.shape), leaf.treatment, f"{leaf.num_elements:,}", "", "")
            for leaf in self.leaves
        ]
        ranked = self._of("protected", "skipped", "small")
        important = _ratio(sum(leaf.num_important for leaf in ranked), whole)
        rows.append(("total", "", "", f"{whole:,}", "", f"{important:.1%}"))
        return "\n".join([*table(header, rows, num_left=3), self._summary()])

    def _summary(self) -> str:
        return (
            f"Protected: {len(self.paths)} of {len(self.leaves)} leaves, {self.protected_fraction:.1%} of the "
            f"parameters (at most {self.max_protected:.1%}), {self.important_fraction:.1%} of the important elements."
        )


def choose_protected(importance: Any, params: Any, max_protected: float = 0.05, *, min_size: int = 1024) -> Protection:
    """Chooses the leaves that are worth reducing in full: many important elements in few parameters.

    Greedy: leaves in the order of their importance, the most important first, as long as they fit in the budget; one
    that does not fit is passed over. Then each that was passed over is tried as the first one, and what holds most
    important elements (beyond the average of the tree) is chosen. A leaf that is no more important than the tree as a
    whole is not: the budget need not be spent. Of equally important leaves the smaller ones come first, then those
    that come first in the tree.

    Leaves under `min_size` elements are reduced in full by `skipreduce` anyway, and take nothing of the budget.

    Call it outside of `jax.jit`: what is protected is settled when the step is traced. **To choose again during the
    training costs one compilation of the step**, if the choice changes. All workers need the same choice: give
    `importance` an `axis_name`, or global arrays.

    Args:
      importance: what `importance` returned for gradients of these parameters (or its average): a pytree of scalars.
      params: the parameters, or their shapes (`jax.eval_shape`).
      max_protected: budget, in [0, 1]: a share of all float elements of `params`.
      min_size: as in `skipreduce`.

    Returns:
      A `Protection`, for ``skipreduce(protect=..)``; `Protection.mask` is the pytree of bools.

    Raises:
      ValueError: the trees differ in structure, a share is no number in [0, 1] (NaN: gradients were not finite), or an
        argument is out of range.
      TypeError: an importance is traced or no scalar, or an argument is no number.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> params = {"conv": jnp.zeros((5, 8)), "dense": jnp.zeros((90, 10)), "head": jnp.zeros((6, 10))}
      >>> chosen = sr.choose_protected({"conv": 0.9, "dense": 0.2, "head": 0.55}, params, min_size=1)
      >>> print(chosen)
      gradient  shape     treatment  elements  of all  important
      ----------------------------------------------------------
      conv      (5, 8)    protected        40    4.0%      90.0%
      dense     (90, 10)  skipped         900   90.0%      20.0%
      head      (6, 10)   skipped          60    6.0%      55.0%
      ----------------------------------------------------------
      total                             1,000              24.9%
      Protected: 1 of 3 leaves, 4.0% of the parameters (at most 5.0%), 14.5% of the important elements.
      >>> tx = sr.skipreduce("data", 0.5, protect=chosen)

    References:
      SkipReduce, MICRO 2025: section 4.4, Figs. 9 and 10.
    """
    check_budget(max_protected, min_size)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), dtype_of(leaf)), params)
    paths, leaves = leaf_paths(shapes), jax.tree.leaves(shapes)
    shares = _numbers(importance, jax.tree.structure(shapes), paths)
    treated = treatments(shapes, [False] * len(leaves), min_size)

    ranked = [i for i, treatment in enumerate(treated) if treatment in ("compressed", "small")]
    sizes = [prod(leaf.shape) for leaf in leaves]
    num_elements = sum(sizes[i] for i in ranked)
    average = _ratio(sum(shares[i] * sizes[i] for i in ranked), num_elements)
    # By more than rounding, both.
    budget = max_protected * num_elements * (1 + 1e-12)
    candidates = [i for i in ranked if treated[i] == "compressed" and shares[i] > average * (1 + 1e-6)]
    candidates.sort(key=lambda i: (-shares[i], sizes[i], i))
    for i in _choose(candidates, sizes, [share - average for share in shares], budget):
        treated[i] = "protected"
    described = tuple(
        LeafImportance(path, leaf.shape, size, share, treatment)
        for path, leaf, size, share, treatment in zip(paths, leaves, sizes, shares, treated, strict=True)
    )
    return Protection(described, float(max_protected), jax.tree.structure(shapes))


def _choose(candidates: list[int], sizes: list[int], gains: list[float], budget: float) -> list[int]:
    """Those to protect of the candidates, which come in the order of their importance."""

    def filled(order: list[int]) -> tuple[float, list[int]]:
        left, taken = budget, []
        for i in order:
            if sizes[i] <= left:
                taken.append(i)
                left -= sizes[i]
        return sum(sizes[i] * gains[i] for i in taken), taken

    best_gain, best = filled(candidates)
    # Greedy alone would take a tiny leaf and then have no room for one that is almost as important and far larger.
    for first in [i for i in candidates if i not in set(best) and sizes[i] <= budget]:
        gain, taken = filled([first, *(i for i in candidates if i != first)])
        if gain > best_gain * (1 + 1e-6):
            best_gain, best = gain, taken
    return best


def check_budget(max_protected: Any, min_size: Any) -> None:
    """Raises TypeError or ValueError if one of them is out of range."""
    for name, value, kinds, most, expected in (
        ("max_protected", max_protected, (int, float, np.number), 1, "a number in [0, 1], such as 0.05 for 5 %"),
        ("min_size", min_size, (int, np.integer), np.inf, "an int of 0 or more"),
    ):
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise TypeError(f"{name}={value!r} ({type(value).__name__}): expected {expected}")
        if not 0 <= value <= most:
            raise ValueError(f"{name}={value}: expected {expected}")


def table(header: tuple[str, ...], rows: list[tuple[str, ...]], num_left: int) -> list[str]:
    """Lines of a table with a rule under the header and one above the last row; the first columns to the left."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    rule = "-" * max(map(len, lines))
    return [lines[0], rule, *lines[1:-1], rule, lines[-1]]


def _numbers(importance: Any, structure: Any, paths: list[str]) -> list[float]:
    """The shares, checked."""
    if jax.tree.structure(importance) != structure:
        raise ValueError(
            f"importance and params differ in structure: {jax.tree.structure(importance)} and {structure}. Give what "
            "sr.importance returned for gradients of these parameters"
        )
    shares = []
    for path, share in zip(paths, jax.tree.leaves(importance), strict=True):
        if isinstance(share, Tracer):
            raise TypeError(
                f"the importance of {path!r} is traced: call sr.choose_protected outside of jax.jit, with values. "
                "What is protected is settled when the step is traced"
            )
        if np.shape(share) != ():
            raise TypeError(
                f"the importance of {path!r} has shape {np.shape(share)}: expected a scalar, as from sr.importance"
            )
        # A mean of float32 may be above 1 by its rounding.
        if not -1e-5 <= (value := float(share)) <= 1 + 1e-5:
            raise ValueError(
                f"the importance of {path!r} is {value}: expected a share in [0, 1]"
                + (". sr.importance gives NaN where a gradient is NaN or infinite" if np.isnan(value) else "")
            )
        shares.append(min(max(value, 0.0), 1.0))
    return shares


def dtype_of(leaf: Any) -> Any:
    """Of an array, a shape, or a number."""
    return leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
