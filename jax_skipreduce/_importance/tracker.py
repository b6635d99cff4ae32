"""Importance through a training: whether a choice made early stays the right one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_skipreduce._importance.average import ImportanceState
from jax_skipreduce._importance.choice import Protection, check_budget, choose_protected, dtype_of, table


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Importance at one time of a training.

    Attributes:
      label: what it was recorded as, such as an epoch.
      chosen: what `choose_protected` chooses of it.
    """

    label: str
    chosen: Protection

    def importances(self) -> dict[str, float]:
        """Of the leaves that there is a choice about, by path: not of those that are reduced in full anyway."""
        return {leaf.path: leaf.importance for leaf in self.chosen.leaves if leaf.treatment in ("protected", "skipped")}


class ImportanceTracker:
    """Keeps importance at several times of a training, and tells how stable the choice is. Prints as a table.

    It works on the host, between steps, with NumPy; `track_importance` averages in the step itself.

    Args:
      params: the parameters, or their shapes.
      max_protected, min_size: as in `choose_protected`.

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> tracker = sr.ImportanceTracker({"a": jnp.zeros(9), "b": jnp.zeros(8), "c": jnp.zeros(83)}, 0.1, min_size=1)
      >>> _ = tracker.record({"a": 0.9, "b": 0.5, "c": 0.1}, "epoch 1")
      >>> _ = tracker.record({"a": 0.6, "b": 0.8, "c": 0.1}, "epoch 2")
      >>> tracker.chosen.paths, tracker.rank_correlation()
      (('b',), 0.5)
      >>> print(tracker)
      snapshot  rho previous  rho first  protected  in first  holds  first holds
      --------------------------------------------------------------------------
      epoch 1              -          -       9.0%         -  39.7%        39.7%
      epoch 2           0.50       0.50       8.0%        0%  31.8%        26.9%
      --------------------------------------------------------------------------
      mean              0.50       0.50       8.5%        0%  35.8%        33.3%
      rho: rank correlation (Spearman) of the importance of 3 leaves with that of the previous and the first snapshot.
      protected: share of the parameters that is chosen; in first: how much of that was in the first choice, too.
      holds: share of the important elements in the leaves chosen now; first holds: in those chosen first.
    """

    def __init__(self, params: Any, max_protected: float = 0.05, *, min_size: int = 1024) -> None:
        check_budget(max_protected, min_size)
        self._params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), dtype_of(leaf)), params)
        self._max_protected, self._min_size = max_protected, min_size
        self._snapshots: list[Snapshot] = []

    @property
    def snapshots(self) -> tuple[Snapshot, ...]:
        """All that were recorded, the oldest first."""
        return tuple(self._snapshots)

    @property
    def chosen(self) -> Protection:
        """The choice of the last snapshot, for ``skipreduce(protect=..)``."""
        return self._at(-1).chosen

    def record(self, importance: Any, label: Any = None) -> Protection:
        """Keeps a snapshot.

        Args:
          importance: what `importance` returned, an `ImportanceState`, or the state of a chain with one
            `track_importance` in it.
          label: of the snapshot, such as an epoch; None: its number.

        Returns:
          What `choose_protected` chooses of it.

        Raises:
          ValueError: a state that holds no sample yet, or more than one `track_importance`; and as `choose_protected`.
          TypeError: as `choose_protected`.
        """
        chosen = choose_protected(
            _importance_of(importance), self._params, self._max_protected, min_size=self._min_size
        )
        self._snapshots.append(Snapshot(str(len(self._snapshots) + 1 if label is None else label), chosen))
        return chosen

    def rank_correlation(self, one: int = -2, other: int = -1) -> float:
        """Spearman's rank correlation between the importance of the leaves in two snapshots.

        1: the same order, -1: the opposite one. Over leaves that there is a choice about, those of `min_size` elements
        and more; leaves that are equally important share the mean of their ranks.

        Args:
          one: index of a snapshot; the last but one.
          other: index of another; the last.

        Returns:
          In [-1, 1]; NaN if there are fewer than two leaves, or all are equally important.

        Raises:
          IndexError: there is no such snapshot.
        """
        first, second = self._at(one).importances(), self._at(other).importances()
        return spearman(list(first.values()), list(second.values()))

    def overlap(self, one: int = 0, other: int = -1) -> float:
        """How much of what snapshot `other` protects is protected by snapshot `one`, too: a share of its elements.

        Raises:
          IndexError: there is no such snapshot.
        """
        before = set(self._at(one).chosen.paths)
        sizes = {
            leaf.path: leaf.num_elements for leaf in self._at(other).chosen.leaves if leaf.treatment == "protected"
        }
        whole = sum(sizes.values())
        if not whole:
            return 1.0 if not before else 0.0
        return sum(size for path, size in sizes.items() if path in before) / whole

    def held(self, choice: int = 0, at: int = -1) -> float:
        """The share of the elements important at snapshot `at` that lie in the leaves chosen at snapshot `choice`.

        Raises:
          IndexError: there is no such snapshot.
        """
        paths, leaves = set(self._at(choice).chosen.paths), self._at(at).chosen.leaves
        whole = sum(leaf.num_important for leaf in leaves)
        return sum(leaf.num_important for leaf in leaves if leaf.path in paths) / whole if whole else 0.0

    def _at(self, index: int) -> Snapshot:
        try:
            return self._snapshots[index]
        except IndexError:
            raise IndexError(
                f"there is no snapshot {index}: {len(self._snapshots)} recorded. tracker.record(..) adds one"
            ) from None

    def __str__(self) -> str:
        if not self._snapshots:
            return "no snapshots: tracker.record(..) adds one"
        header = ("snapshot", "rho previous", "rho first", "protected", "in first", "holds", "first holds")
        numbers = [
            (
                # The first is compared with itself nowhere.
                *(self.rank_correlation(i - 1, i) if i else np.nan, self.rank_correlation(0, i) if i else np.nan),
                *(self._snapshots[i].chosen.protected_fraction, self.overlap(0, i) if i else np.nan),
                *(self.held(i, i), self.held(0, i)),
            )
            for i in range(len(self._snapshots))
        ]
        means = [
            float(np.mean(known)) if (known := _known(column)) else np.nan for column in zip(*numbers, strict=True)
        ]
        labels = [*(snapshot.label for snapshot in self._snapshots), "mean"]
        formats = ("{:.2f}", "{:.2f}", "{:.1%}", "{:.0%}", "{:.1%}", "{:.1%}")
        rows = [
            (label, *("-" if np.isnan(x) else form.format(x) for form, x in zip(formats, row, strict=True)))
            for label, row in zip(labels, [*numbers, means], strict=True)
        ]
        num_leaves = len(self._snapshots[0].importances())
        return "\n".join(
            [
                *table(header, rows, num_left=1),
                f"rho: rank correlation (Spearman) of the importance of {num_leaves} leaves with that of the previous "
                "and the first snapshot.",
                "protected: share of the parameters that is chosen; in first: how much of that was in the first "
                "choice, too.",
                "holds: share of the important elements in the leaves chosen now; first holds: in those chosen first.",
            ]
        )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation of two sequences of the same length; NaN where it is not defined."""
    ranks = [_ranks(np.asarray(values, np.float64)) for values in (first, second)]
    if len(first) < 2 or any(np.ptp(each) == 0 for each in ranks):
        return float("nan")
    return float(np.corrcoef(ranks)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """From 0; equal values share the mean of theirs."""
    _, group, sizes = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(sizes) - 1
    return (last - (sizes - 1) / 2)[group]


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not np.isnan(value)]


def _importance_of(value: Any) -> Any:
    """The pytree of shares in a state, or `value` itself."""

    def is_state(x: Any) -> bool:
        return isinstance(x, ImportanceState)

    states = [leaf for leaf in jax.tree.leaves(value, is_leaf=is_state) if is_state(leaf)]
    if not states:
        return value
    if len(states) > 1:
        raise ValueError(f"this state has {len(states)} of sr.track_importance in it: give the ImportanceState of one")
    (state,) = states
    if isinstance(state.num_averaged, Tracer):
        raise TypeError("the state is traced: record it outside of jax.jit")
    if int(state.num_averaged) == 0:
        raise ValueError(
            f"nothing to record: after {int(state.count)} steps there was no sample yet whose gradients were finite"
        )
    return state.importance
