"""The skip ratio, a number or a schedule, for all gradients or for each one, and the number of steps k it means."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._workers.axes import outside_of_the_trace

# The ratio of one gradient: a number, or a schedule (count) -> number.
SkipRatio: TypeAlias = float | jax.Array | Callable[[Any], Any]
# The ratios of a tree of gradients: one ratio for all, a pytree of ratios, or a function (path, leaf) -> ratio.
SkipRatios: TypeAlias = Any

_EXPECTED = (
    "expected a number in [0, 1): the share of its gradients that each worker leaves out, 0.5 for half; the most is "
    "(N-1)/N for N workers"
)

# Steps at which processes compare their schedules.
_COMPARED_COUNTS = (0, *(2**power for power in range(21)))

# Steps at which a schedule's ratio is looked at when the training step is traced.
_PROBED_COUNTS = (0, 1, 10, 100, 1_000, 10_000, 100_000, 1_000_000)


def check_ratio(ratio: Any, where: str = "") -> None:
    """Raises TypeError or ValueError if `ratio` is no number in [0, 1). A traced ratio cannot be checked."""
    if isinstance(ratio, Tracer):
        return
    try:
        if isinstance(ratio, (str, bytes, bool, np.bool_)):
            raise TypeError
        value = float(ratio)
    except (TypeError, ValueError):
        raise TypeError(f"skip_ratio={ratio!r}{where}: {_EXPECTED}, or an optax schedule that gives one") from None
    if not 0 <= value < 1:  # neither is NaN
        raise ValueError(f"skip_ratio={value}{where}: {_EXPECTED}")


def check_ratios(ratios: SkipRatios) -> None:
    """Raises TypeError or ValueError if `ratios` has a number that is no skip ratio."""
    if isinstance(ratios, (dict, list, tuple)) and not jax.tree.leaves(ratios):
        raise TypeError(f"skip_ratio={ratios!r}: {_EXPECTED}, or a pytree of them with the structure of the gradients")
    for path, ratio in zip(leaf_paths(ratios), jax.tree.leaves(ratios), strict=True):
        if not callable(ratio):
            check_ratio(ratio, "" if path == "(root)" else f" for {path!r}")


def ratios_of_leaves(ratios: SkipRatios, tree: Any) -> list[SkipRatio]:
    """The ratio of each leaf of `tree`, in order: a number, or a schedule.

    Raises:
      ValueError: a pytree of ratios whose structure is neither that of `tree` nor a prefix of it; a number
        that is out of range.
      TypeError: a function of (path, leaf) gives neither a number nor a schedule.
    """
    paths, leaves = leaf_paths(tree), jax.tree.leaves(tree)
    if callable(ratios):
        if not is_of_each(ratios):
            return [ratios] * len(leaves)
        answers: list[Any] = [ratios(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    else:
        try:
            answers = jax.tree.leaves(jax.tree.broadcast(ratios, tree))
        except ValueError as error:
            raise ValueError(
                "skip_ratio: the pytree of ratios does not match the tree of gradients. Give a number, a pytree with "
                "the structure of the gradients (or a prefix of it), or a function of (path, leaf). JAX says: "
                f"{str(error).splitlines()[0]}"
            ) from None
    for path, answer in zip(paths, answers, strict=True):
        if not callable(answer):
            check_ratio(answer, "" if answer is ratios else f" for the leaf {path!r}")
    return answers


def is_of_each(ratios: SkipRatios) -> bool:
    """Whether `ratios` has a ratio per leaf: a pytree, or a function of (path, leaf) and not of the counter."""
    if not callable(ratios):
        return not jax.tree_util.treedef_is_leaf(jax.tree.structure(ratios))
    try:
        signature = inspect.signature(ratios)
    except (TypeError, ValueError):
        return False  # written in C; schedules may be
    return _takes(signature, 2) and not _takes(signature, 1)


def _takes(signature: inspect.Signature, num_arguments: int) -> bool:
    try:
        signature.bind(*[None] * num_arguments)
    except TypeError:
        return False
    return True


def num_steps_of(ratio: Any, num_workers: int) -> int | jax.Array:
    """The number of steps k of N-1 that a ratio means: round(ratio * N), half to even, at most N-1.

    Known and traced ratios are both rounded in float32, so that both round alike. A traced k is clamped.
    """
    if isinstance(ratio, Tracer):
        if ratio.shape != ():
            raise TypeError(f"skip_ratio has type {jax.typeof(ratio)}: expected a scalar")
        steps = jnp.round(ratio.astype(jnp.float32) * num_workers)
        return jnp.clip(steps, 0, num_workers - 1).astype(jnp.int32)
    return min(int(np.round(np.float32(ratio) * np.float32(num_workers))), num_workers - 1)


def ratio_at(ratio: SkipRatio, count: Any) -> Any:
    """The ratio in step `count` of the training.

    Raises:
      ValueError, TypeError: a schedule gives something else than a number in [0, 1), now or at one
        of the steps that are probed.
    """
    if not callable(ratio):
        return ratio
    _look_ahead(ratio)
    now = ratio(count)
    check_ratio(now, "" if isinstance(count, Tracer) else f" at step {count}")
    return now


def _look_ahead(schedule: Callable[[Any], Any]) -> None:
    """Checks what `schedule` gives at some steps, although the counter is traced here.

    A schedule is a function of the counter alone, so it can be called with numbers.
    """

    def look() -> None:
        for count in _PROBED_COUNTS:
            check_ratio(schedule(jnp.int32(count)), f" at step {count}")

    outside_of_the_trace(look)


def schedule_text(schedule: Callable[[Any], Any]) -> str:
    """What `schedule` gives at some steps, for a comparison between processes."""
    values: list[Any] = outside_of_the_trace(lambda: [schedule(jnp.int32(count)) for count in _COMPARED_COUNTS])
    # Processors of different types may differ in the last digits.
    return ", ".join(f"{float(value):.4g}" for value in values)
