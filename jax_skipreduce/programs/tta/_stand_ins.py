"""Collectives that send nothing: a step traced with them costs its local work alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax


@contextlib.contextmanager
def nothing_on_the_wire() -> Iterator[None]:
    """While a step is traced in here, the collectives of `jax.lax` have the shapes of the real ones and stay local.

    For timing alone: results are wrong. Under ``shard_map(check_vma=False)`` only, because the types of the real
    ones say that workers share a value.
    """
    with contextlib.ExitStack() as stack:
        for name, stand_in in _STAND_INS.items():
            stack.enter_context(mock.patch.object(lax, name, stand_in))
        yield


def _fence(x: jax.Array, axis_name: Any) -> jax.Array:
    """`x`, across a border that XLA does not fuse over, as it does not over a collective.

    `lax.optimization_barrier` is gone before XLA's CPU backend fuses. This is a loop that XLA cannot know to make no
    pass: no rank is negative.
    """
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    # The name bound here is no stand-in.
    never = lax.axis_index(tuple(names)) < 0
    return lax.while_loop(lambda carry: carry[0], lambda carry: (~carry[0], carry[1] + carry[1]), (never, x))[1]


def _passed_on(x: Any, axis_name: Any, *_: Any, **__: Any) -> Any:
    return jax.tree.map(lambda leaf: _fence(leaf, axis_name), x)


def _sum(x: Any, axis_name: Any, **_: Any) -> Any:
    # The sum of a Python number is how programs ask for the number of workers.
    def add(leaf: Any) -> Any:
        return leaf * lax.axis_size(axis_name) if isinstance(leaf, (int, float)) else _fence(leaf, axis_name)

    return jax.tree.map(add, x)


def _mean(x: Any, axis_name: Any, **_: Any) -> Any:
    # The division is the local part of the real one.
    return jax.tree.map(lambda leaf: _fence(leaf, axis_name) / lax.axis_size(axis_name), x)


def _all_gather(x: Any, axis_name: Any, *, axis: int = 0, tiled: bool = False, **_: Any) -> Any:
    def gather(leaf: jax.Array) -> jax.Array:
        size = lax.axis_size(axis_name)
        if tiled:
            rows = jnp.concatenate([leaf] * size, axis=axis)
        else:
            rows = jnp.repeat(jnp.expand_dims(leaf, axis), size, axis=axis)
        return _fence(rows, axis_name)

    return jax.tree.map(gather, x)


def _psum_scatter(x: Any, axis_name: Any, *, scatter_dimension: int = 0, tiled: bool = False, **_: Any) -> Any:
    def scatter(leaf: jax.Array) -> jax.Array:
        num_rows = leaf.shape[scatter_dimension] // lax.axis_size(axis_name)
        part = lax.slice_in_dim(_fence(leaf, axis_name), 0, num_rows, axis=scatter_dimension)
        return part if tiled else jnp.squeeze(part, scatter_dimension)

    return jax.tree.map(scatter, x)


_STAND_INS: dict[str, Callable[..., Any]] = {
    "ppermute": _passed_on,
    "pmax": _passed_on,
    "pmin": _passed_on,
    "psum": _sum,
    "pmean": _mean,
    "all_gather": _all_gather,
    "psum_scatter": _psum_scatter,
}
