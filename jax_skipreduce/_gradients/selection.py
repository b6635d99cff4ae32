"""Which gradients a compressor gets, and which are reduced in full."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._workers.arguments import check_dtype

Protect: TypeAlias = Any  # a pytree of bools, a function (path, leaf) -> bool, or None
Treatment = Literal["compressed", "protected", "small", "integer", "empty"]


@dataclasses.dataclass(frozen=True)
class ByPath:
    """A function of (path, leaf): whether a pattern is found in the path. What `by_path` returns."""

    pattern: re.Pattern[str]

    def __call__(self, path: str, leaf: Any) -> bool:
        del leaf
        return self.pattern.search(path) is not None

    def __repr__(self) -> str:
        return f"by_path({self.pattern.pattern!r})"


def by_path(pattern: str | re.Pattern[str]) -> ByPath:
    """Selects leaves whose path matches a regular expression, for ``skipreduce(protect=...)``.

    Args:
      pattern: searched for (`re.search`) in the path of a leaf, its keys joined with ``/``:
        ``params/conv1/kernel``, ``layers/0/weight``.

    Returns:
      A function of (path, leaf).

    Raises:
      ValueError: `pattern` is no regular expression.
      TypeError: `pattern` is no string.

    Example:
      >>> import jax_skipreduce as sr
      >>> is_embedding = sr.by_path(r"embed|^head/")
      >>> is_embedding("encoder/embed/table", None), is_embedding("encoder/mlp/kernel", None)
      (True, False)
    """
    if not isinstance(pattern, (str, re.Pattern)):
        raise TypeError(
            f"pattern={pattern!r} ({type(pattern).__name__}): expected a regular expression, such as 'embed'"
        )
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is not a regular expression: {error}") from None

    return ByPath(compiled)


def protected_leaves(tree: Any, protect: Protect) -> list[bool]:
    """Whether `protect` names each leaf of `tree`, in order.

    Raises:
      ValueError: a mask whose structure is neither that of `tree` nor a prefix of it.
      TypeError: something other than a bool, in a mask or from a function.
    """
    paths = leaf_paths(tree)
    if protect is None:
        return [False] * len(paths)
    if isinstance(protect, str):
        raise TypeError(
            f"protect={protect!r}: a string is no mask. To protect leaves by their path, sr.by_path({protect!r})"
        )
    if callable(protect):
        try:
            inspect.signature(protect).bind("path", None)
        except TypeError as error:
            raise TypeError(f"protect={protect!r}: expected a function of (path, leaf): {error}") from None
        answers: list[Any] = [protect(path, leaf) for path, leaf in zip(paths, jax.tree.leaves(tree), strict=True)]
        what = "protect(path, leaf) returned"
    else:
        try:
            answers = jax.tree.leaves(jax.tree.broadcast(protect, tree))
        except ValueError as error:
            raise ValueError(
                "protect: the mask does not match the tree of gradients. Give a pytree of bools with the "
                "structure of the gradients (or a prefix of it), or a function of (path, leaf). JAX says: "
                f"{str(error).splitlines()[0]}"
            ) from None
        what = "the mask protect has"
    for path, answer in zip(paths, answers, strict=True):
        if isinstance(answer, Tracer) or np.asarray(answer).dtype != bool or np.shape(answer) != ():
            raise TypeError(
                f"{what} {answer!r} for the leaf {path!r}: expected True or False. What is protected is "
                "settled when the step is traced; it may depend on path, shape and dtype, not on values"
            )
    return [bool(answer) for answer in answers]


def treatments(tree: Any, is_protected: Sequence[bool], min_size: int) -> list[Treatment]:
    """What happens to each leaf of `tree`, in order.

    ``"compressed"`` leaves go through the compressor. Protected leaves, leaves under `min_size` elements, and
    integer and bool leaves are reduced in full. Leaves without elements (``"empty"``: zero size, or the float0 of
    a gradient with respect to integers) are left alone.

    Raises:
      TypeError: a leaf is no array, or has a dtype that cannot be reduced.
    """
    return [
        _treatment(path, leaf, mark, min_size)
        for path, leaf, mark in zip(leaf_paths(tree), jax.tree.leaves(tree), is_protected, strict=True)
    ]


def _treatment(path: str, leaf: Any, is_protected: bool, min_size: int) -> Treatment:
    if not hasattr(leaf, "dtype") or not hasattr(leaf, "shape"):
        raise TypeError(f"leaf {path!r} is {leaf!r} ({type(leaf).__name__}): expected an array")
    if leaf.dtype == jax.dtypes.float0 or leaf.size == 0:
        return "empty"
    if leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.integer):
        return "integer"
    check_dtype(leaf.dtype, f"leaf {path!r}")
    if is_protected:
        return "protected"
    return "small" if leaf.size < min_size else "compressed"


def indices_of(all_treatments: Sequence[Treatment], *wanted: Treatment) -> list[int]:
    """Positions of the leaves that are treated in one of the `wanted` ways."""
    return [i for i, treatment in enumerate(all_treatments) if treatment in wanted]
