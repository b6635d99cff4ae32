"""The state of a transformation: a counter, and what each worker keeps for itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._gradients.selection import Treatment, protected_leaves, treatments
from jax_skipreduce._gradients.specs import axes_in_order, is_spec
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


def state_specs(opt_state: Any, axis_name: AxisName, param_specs: Any = None) -> Any:
    """How the state of an optimizer is sharded: for ``in_specs`` and ``out_specs`` of `jax.shard_map`.

    What workers keep for themselves (`SkipReduceState.per_worker`) has a row per worker, ``P(axis_name)``. All else is
    the same on all workers, ``P()``. The state of `skipreduce` is only a counter, so ``P()`` serves for it as well.

    Under `jax.vmap` the same leaves are mapped. The ``in_axes`` are
    ``jax.tree.map(lambda spec: 0 if spec else None, specs, is_leaf=lambda x: isinstance(x, P))``.

    Args:
      opt_state: the state of an optimizer, or its shapes (`jax.eval_shape`).
      axis_name: the data axis, or a tuple of axes, in the order of the mesh.
      param_specs: where parameters are sharded over other axes that are manual as well, the `PartitionSpec` of each
        parameter, in the structure of the parameters: each shard has rows of its own.

    Returns:
      A pytree of `jax.sharding.PartitionSpec` with the structure of `opt_state`.

    Raises:
      ValueError: `axis_name` names no axis, or there is not one of `param_specs` for each parameter.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jax_skipreduce as sr
      >>> tx = optax.chain(sr.skipreduce("data"), optax.sgd(0.1))
      >>> sr.state_specs(tx.init(jnp.zeros(4)), "data")[0].num_reductions
      P()
    """
    names = axis_names(axis_name)
    given = None if param_specs is None else jax.tree.leaves(param_specs, is_leaf=is_spec)

    def specs(node: Any) -> Any:
        if not _is_state(node):
            return PartitionSpec()
        if given is not None and len(given) != len(node.per_worker) and node.per_worker:
            raise ValueError(
                f"param_specs has {len(given)} PartitionSpecs, and the state entries for {len(node.per_worker)} "
                "parameters: expected one for each parameter"
            )
        others = [()] * len(node.per_worker) if given is None else map(axes_in_order, given)
        rows = [PartitionSpec((*names, *more)) for more in others]
        return SkipReduceState(PartitionSpec(), specs_of_rows(node.per_worker, rows))

    return jax.tree.map(specs, opt_state, is_leaf=_is_state)


def specs_of_rows(per_worker: Any, rows: Sequence[PartitionSpec]) -> Any:
    """One spec for each leaf of what workers keep, from one for each gradient."""
    if not per_worker:
        return per_worker
    entries = zip(per_worker, rows, strict=True)
    return tuple(jax.tree.map(lambda _, spec=spec: spec, entry) for entry, spec in entries)


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
        def of_one() -> Any:
            return settings.compressor.init(shard.leaf, shard.num_workers)

        def of_all() -> Any:
            num_rows = shard.num_parts if group is not None else shard.num_workers * shard.num_parts
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (num_rows, *x.shape)), of_one())

        if group is not None:
            names = tuple(shard.axes) if group.tracked and shard.num_parts == 1 else ()
            own = of_one() if group.is_simulated else of_all()
            return jax.tree.map(lambda x, group=group: make_varying(group.local(x), names), own)
        mesh = settings.mesh if settings.mesh is not None else _ambient_mesh()
        if not isinstance(mesh, jax.sharding.Mesh):
            return of_all()
        # Made where they belong: all rows on one device would be N times the parameters.
        spec = PartitionSpec((*axis_names(settings.axis_name), *shard.axes))
        return jax.jit(of_all, out_shardings=NamedSharding(mesh, spec))()

    kept = [rows(shard) if how == "compressed" else None for shard, how in zip(shards, treated, strict=True)]
    return SkipReduceState(counter, () if all(entry is None for entry in kept) else tuple(kept))


def take_row(settings: Settings, group: Group, grads: Any, treated: Sequence[Treatment], per_worker: Any) -> list[Any]:
    """What this worker keeps of each gradient, checked against the state that the compressor would make.

    Raises:
      ValueError: the state belongs to another number of workers, to other gradients, or to another compressor.
    """
    leaves, paths = jax.tree.leaves(grads), leaf_paths(grads)
    name = settings.compressor.name
    if settings.compressor.keeps_state:
        expected = [
            _kept_of(settings, leaf, group.size) if how == "compressed" else None
            for leaf, how in zip(leaves, treated, strict=True)
        ]
    else:
        expected = [None] * len(leaves)
    if all(entry is None for entry in expected):
        if jax.tree.leaves(per_worker):
            raise ValueError(
                f"the state holds what workers keep ({len(per_worker)} entries), and {name} keeps nothing of these "
                "gradients: it would be lost. Restore it into the settings that it was made with, or start with tx.init"
            )
        return expected
    what = f"the state of {name}"
    if not isinstance(per_worker, (tuple, list)) or len(per_worker) != len(leaves):
        raise ValueError(
            f"{what} is {jax.tree.structure(per_worker)}: expected an entry for each of {len(leaves)} gradients, as "
            "tx.init makes it for these parameters"
        )
    lead = () if group.is_simulated else (1,)
    rows = []
    for path, entry, kept in zip(paths, expected, per_worker, strict=True):
        if jax.tree.structure(kept) != jax.tree.structure(entry):
            raise ValueError(f"{what} for {path!r} is {jax.tree.structure(kept)}: expected {jax.tree.structure(entry)}")
        for own, wanted in zip(jax.tree.leaves(kept), jax.tree.leaves(entry), strict=True):
            if own.shape != (*lead, *wanted.shape):
                raise ValueError(
                    f"{what} for {path!r} has shape {own.shape} on a worker: expected {(*lead, *wanted.shape)}, one "
                    f"row for each of {group.size} workers. Pass it through jax.shard_map with sr.state_specs("
                    "opt_state, axis_name). A checkpoint of another N goes through resize_state first"
                )
            if own.dtype != wanted.dtype:
                raise ValueError(
                    f"{what} for {path!r} has dtype {own.dtype}, and gradients want {wanted.dtype}: tx.init makes "
                    "it in the dtype of the parameters. Cast the gradients"
                )
        rows.append(kept if group.is_simulated else jax.tree.map(lambda x: x[0], kept))
    return rows


def put_row(name: str, group: Group, rows: list[Any], before: Any) -> Any:
    """`SkipReduceState.per_worker` with the new rows of this worker, which the compressor `name` made.

    Raises:
      ValueError: a row has another shape or dtype than before.
    """
    if all(row is None for row in rows):
        return ()

    def typed(x: jax.Array, old: jax.Array) -> jax.Array:
        kept = old.shape if group.is_simulated else old.shape[1:]
        if (x.shape, x.dtype) != (kept, old.dtype):
            raise ValueError(
                f"{name} keeps {x.dtype}{list(x.shape)} after the step, and kept {old.dtype}{list(kept)} before: its "
                "reduce has to return states as it gets them"
            )
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
    states = [state for state in states_in(opt_state) if jax.tree.leaves(state.per_worker)]
    if len(states) > 1:
        raise ValueError(f"opt_state holds {len(states)} states that workers keep: expected one. Give one at a time")

    def resized_leaf(shard: Shard, entry: Any, path: str) -> Any:
        if entry is None:
            return None
        one, parts = _kept_of(settings, shard.leaf, num_workers), shard.num_parts

        def check(tree: Any, num_rows: int | None, whose: str) -> None:
            def is_wrong(x: Any, y: Any) -> bool:
                rows, *rest = x.shape or (0,)
                return tuple(rest) != y.shape or not rows or rows % parts != 0 or num_rows not in (None, rows)

            if any(is_wrong(x, y) for x, y in _pairs(tree, one)):
                raise ValueError(
                    f"{whose} for {path!r} has shapes {[x.shape for x in jax.tree.leaves(tree)]}: expected rows of "
                    f"{[y.shape for y in jax.tree.leaves(one)]}, {parts} for each worker"
                )

        check(entry, None, "the state")
        split = jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), entry)
        new = settings.compressor.resize(split, num_workers)
        joined = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), new)
        check(joined, num_workers * parts, f"what {settings.compressor.name} made of the state")
        return joined

    def resized(node: Any) -> Any:
        if not _is_state(node) or not jax.tree.leaves(node.per_worker):
            return node
        if len(node.per_worker) != len(shards):
            raise ValueError(f"the state has {len(node.per_worker)} entries, and params {len(shards)} leaves")
        entries = zip(shards, node.per_worker, leaf_paths(params), strict=True)
        return node._replace(per_worker=tuple(resized_leaf(*entry) for entry in entries))

    return jax.tree.map(resized, opt_state, is_leaf=_is_state)


def _kept_of(settings: Settings, leaf: Any, num_workers: int) -> Any:
    """What a worker keeps of one leaf, as shapes."""
    shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return jax.eval_shape(lambda: settings.compressor.init(shape, num_workers))


def _pairs(tree: Any, other: Any) -> list[tuple[Any, Any]]:
    if jax.tree.structure(tree) != jax.tree.structure(other):
        raise ValueError(f"the state is {jax.tree.structure(tree)}: expected {jax.tree.structure(other)}")
    return list(zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


def _ambient_mesh() -> Any:
    """The mesh of `jax.set_mesh`, outside of a trace; None in it, or without one."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        return None
    return None if mesh.empty else mesh


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
