"""The state of a transformation: a counter, and what each worker keeps for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.selection import Treatment, protected_leaves, treatments
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._transform.shards import Shard, shards_of
from jax_skipreduce._workers.axes import AxisName, axis_names, make_varying, varying_axes
from jax_skipreduce._workers.group import Group


class SkipReduceState(NamedTuple):
    """State of `skipreduce`, and of every other transformation of this package.

    Attributes:
      num_reductions: int32 scalar, steps made; the same on all workers. The counter stops at the largest int32.
      per_worker: what workers keep for themselves: ``()`` if they keep nothing, as in `skipreduce`. Else a tuple with
        an entry per gradient: None if the gradient is reduced in full, else a pytree of arrays with a row per worker,
        shape (N, ..). `state_specs` says how the rows are sharded.
    """

    num_reductions: Any
    per_worker: Any = ()

    @property
    def count(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The name of `num_reductions` before version 0.2. It clashed with the name of optax's counters."""
        raise AttributeError("SkipReduceState.count is called num_reductions since version 0.2")


def state_specs(opt_state: Any, axis_name: AxisName) -> Any:
    """How the state of an optimizer is sharded: for ``in_specs`` and ``out_specs`` of `jax.shard_map`.

    What workers keep for themselves (`SkipReduceState.per_worker`) has a row per worker, ``P(axis_name)``. All else is
    the same on all workers, ``P()``. The state of `skipreduce` is only a counter, so ``P()`` serves for it as well.

    Under `jax.vmap` the same leaves are mapped. The ``in_axes`` are
    ``jax.tree.map(lambda spec: 0 if spec else None, specs, is_leaf=lambda x: isinstance(x, P))``.

    Args:
      opt_state: the state of an optimizer, or its shapes (`jax.eval_shape`).
      axis_name: the data axis, or a tuple of axes, in the order of the mesh. Manual axes that parameters are sharded
        over belong to the tuple.

    Returns:
      A pytree of `jax.sharding.PartitionSpec` with the structure of `opt_state`.

    Raises:
      ValueError: `axis_name` names no axis.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jax_skipreduce as sr
      >>> tx = optax.chain(sr.skipreduce("data"), optax.sgd(0.1))
      >>> sr.state_specs(tx.init(jnp.zeros(4)), "data")[0].num_reductions
      P()
    """
    names = axis_names(axis_name)
    rows = PartitionSpec(names)

    def specs(node: Any) -> Any:
        if not _is_state(node):
            return PartitionSpec()
        return SkipReduceState(PartitionSpec(), jax.tree.map(lambda _: rows, node.per_worker))

    return jax.tree.map(specs, opt_state, is_leaf=_is_state)


def states_in(opt_state: Any) -> list[SkipReduceState]:
    """The states of this package's transformations in the state of an optimizer."""
    return [state for state in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(state)]


def init_state(settings: Settings, params: Any) -> SkipReduceState:
    """The state before the first step.

    Where the axis is bound (in shard_map and vmap) the state holds the row of this worker, elsewhere the rows of all.
    """
    counter = jnp.zeros([], jnp.int32)
    if not settings.compressor.keeps_state:
        return SkipReduceState(counter)
    group = _bound_group(settings)
    shards = shards_of(settings, params, group)
    tree = jax.tree.unflatten(jax.tree.structure(params), [shard.leaf for shard in shards])
    treated = treatments(tree, protected_leaves(tree, settings.protect), settings.min_size)

    def rows(shard: Shard) -> Any:
        state = settings.compressor.init(shard.leaf, shard.num_workers)
        if group is not None:
            names = tuple(shard.axes) if group.tracked else ()
            local = jax.tree.map(lambda x, group=group: make_varying(group.local(x), names), state)
            return local if group.is_simulated else jax.tree.map(lambda x: x[None], local)
        stacked = jax.tree.map(lambda x: jnp.broadcast_to(x, (shard.num_rows, *x.shape)), state)
        if not isinstance(settings.mesh, jax.sharding.Mesh):
            return stacked
        sharding = NamedSharding(settings.mesh, row_spec(settings, shard))
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, sharding), stacked)

    kept = [rows(shard) if how == "compressed" else None for shard, how in zip(shards, treated, strict=True)]
    return SkipReduceState(counter, () if all(entry is None for entry in kept) else tuple(kept))


def row_spec(settings: Settings, shard: Shard) -> PartitionSpec:
    """How the rows of a leaf are sharded on the mesh of a pjit program."""
    others = tuple(name for name in settings.mesh.axis_names if name in shard.axes)
    return PartitionSpec((*axis_names(settings.axis_name), *others))


def take_row(settings: Settings, group: Group, grads: Any, treated: Sequence[Treatment], per_worker: Any) -> list[Any]:
    """What this worker keeps of each gradient, checked against the state that the compressor would make.

    Raises:
      ValueError: the state belongs to another number of workers, or to other gradients.
    """
    leaves, paths = jax.tree.leaves(grads), leaf_paths(grads)
    if not settings.compressor.keeps_state:
        return [None] * len(leaves)
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    expected = [
        jax.eval_shape(lambda shape=shape: settings.compressor.init(shape, group.size)) if how == "compressed" else None
        for shape, how in zip(shapes, treated, strict=True)
    ]
    if all(entry is None for entry in expected):
        return expected
    if settings.fast_axes:
        raise ValueError(
            f"fast_axes={settings.fast_axes}: {settings.compressor.name} keeps state per worker, which does not go "
            "with two networks. Leave fast_axes out, and name all data axes in axis_name"
        )
    lead = () if group.is_simulated else (1,)
    what = f"the state of {settings.compressor.name}"
    if not isinstance(per_worker, (tuple, list)) or len(per_worker) != len(leaves):
        raise ValueError(
            f"{what} is {jax.tree.structure(per_worker)}: expected an entry for each of {len(leaves)} gradients, as "
            "tx.init makes it for these parameters"
        )
    rows = []
    for path, entry, kept in zip(paths, expected, per_worker, strict=True):
        if jax.tree.structure(kept) != jax.tree.structure(entry):
            raise ValueError(f"{what} for {path!r} is {jax.tree.structure(kept)}: expected {jax.tree.structure(entry)}")
        for own, wanted in zip(jax.tree.leaves(kept), jax.tree.leaves(entry), strict=True):
            if own.shape != (*lead, *wanted.shape) or own.dtype != wanted.dtype:
                raise ValueError(
                    f"{what} for {path!r} has {own.dtype}{list(own.shape)} on a worker: expected {wanted.dtype}"
                    f"{[*lead, *wanted.shape]}, one row for each of {group.size} workers. Pass it through "
                    "jax.shard_map with sr.state_specs(opt_state, axis_name). A checkpoint of another N goes through "
                    "resize_state first"
                )
        rows.append(kept if group.is_simulated else jax.tree.map(lambda x: x[0], kept))
    return rows


def put_row(group: Group, rows: list[Any], before: Any) -> Any:
    """`SkipReduceState.per_worker` with the new rows of this worker."""
    if all(row is None for row in rows):
        return ()

    def typed(x: jax.Array, old: jax.Array) -> jax.Array:
        names = tuple(varying_axes(old)) if group.tracked else ()
        return make_varying(group.local(x), names)

    lead = (lambda x: x) if group.is_simulated else (lambda x: x[None])
    return tuple(
        None if row is None else jax.tree.map(lambda x, old: lead(typed(x, old)), row, old)
        for row, old in zip(rows, before, strict=True)
    )


def resize_state(settings: Settings, opt_state: Any, params: Any, num_workers: int) -> Any:
    """`opt_state` from a run with another number of workers, changed for `num_workers` workers.

    What each old worker kept is handed to the new workers, as the compressor says (`Compressor.resize`).

    Raises:
      ValueError: the compressor has no rule, or the state belongs to other parameters.
    """
    shards = shards_of(settings, params, None, num_workers)

    def resized(node: Any) -> Any:
        if not _is_state(node) or not jax.tree.leaves(node.per_worker):
            return node
        if len(node.per_worker) != len(shards):
            raise ValueError(f"the state has {len(node.per_worker)} entries, and params {len(shards)} leaves")
        entries = []
        for shard, entry in zip(shards, node.per_worker, strict=True):
            parts = shard.num_parts
            split = jax.tree.map(lambda x, m=parts: x.reshape(x.shape[0] // m, m, *x.shape[1:]), entry)
            new = None if entry is None else settings.compressor.resize(split, num_workers)
            entries.append(jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), new))
        return node._replace(per_worker=tuple(entries))

    return jax.tree.map(resized, opt_state, is_leaf=_is_state)


def _bound_group(settings: Settings) -> Group | None:
    """The workers, if their axis is bound; else None."""
    if settings.mesh is not None:
        return None
    try:
        return Group.of(settings.axis_name)
    except ValueError:
        return None


def _is_state(node: Any) -> bool:
    return isinstance(node, SkipReduceState)
