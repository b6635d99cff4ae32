"""Named axes: which workers there are, and what JAX knows about who holds the same value."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

AxisName: TypeAlias = Hashable | Sequence[Hashable]


def axis_names(axis_name: AxisName) -> tuple[Hashable, ...]:
    """The names in `axis_name` as a tuple, in the order given.

    Raises:
      ValueError: there is none, or one is given twice.
    """
    names = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if not names or any(name is None or isinstance(name, (int, float)) for name in names):
        raise ValueError(f"axis_name={axis_name!r}: expected the name of a mesh axis, such as 'data', or several")
    if len(set(names)) != len(names):
        raise ValueError(f"axis_name={axis_name!r}: an axis is named twice")
    return names


def bound_axes(axis_name: AxisName) -> tuple[Hashable, ...]:
    """The names in `axis_name`, checked, in the order of the mesh.

    `lax.ppermute` numbers workers in mesh order, `lax.axis_index` and `lax.all_gather` in the order
    of the tuple. With names in mesh order, all three give a rank to the same worker.

    Raises:
      ValueError: an axis is not bound where this is called, or several are bound by `vmap`.
    """
    names = axis_names(axis_name)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            manual = jax.sharding.get_abstract_mesh().manual_axes
            bound = f" (only {', '.join(map(repr, manual))})" if manual else ""
            raise ValueError(
                f"axis_name={axis_name!r}: no axis {name!r} is bound here{bound}. Call this inside "
                f"jax.shard_map over a mesh with an axis {name!r} (and with {name!r} among its "
                "axis_names), or under jax.vmap(..., axis_name=...) to simulate workers; outside of "
                "those, sr.skipreduce takes mesh= and gradients stacked on a leading axis"
            ) from None
    if len(names) == 1:
        return names
    mesh_names = jax.sharding.get_abstract_mesh().axis_names
    missing = [name for name in names if name not in mesh_names]
    if missing:
        raise ValueError(
            f"axis_name={axis_name!r}: {missing} are not axes of a mesh. Several axes at once need "
            "jax.shard_map; under jax.vmap give one axis, with all workers on it"
        )
    return tuple(sorted(names, key=mesh_names.index))


def outside_of_the_trace(function: Callable[[], Any]) -> Any:
    """``function()``, which computes with numbers that are known, where nothing of the surrounding trace is seen.

    `function` runs in a thread of its own: `jax.ensure_compile_time_eval` does not clear the ambient mesh or the
    transfer guards.
    """
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(function).result()


def varying_axes(x: Any) -> frozenset[Hashable]:
    """Mesh axes over which JAX takes the value of `x` to vary. Empty where JAX does not track it."""
    # Concrete Python and NumPy values are the same everywhere.
    return frozenset(jax.typeof(x).mat.varying)


def is_tracked(rank: jax.Array, names: tuple[Hashable, ...]) -> bool:
    """Whether JAX tracks varying values, as the type of `rank` shows: in ``shard_map(check_vma=True)`` alone."""
    return set(names) <= varying_axes(rank)


def make_varying(x: jax.Array, names: tuple[Hashable, ...]) -> jax.Array:
    """`x`, typed as varying over `names`, which have to be tracked."""
    # A second cast over the same axis raises, so only missing axes are cast over.
    missing = tuple(name for name in names if name not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def check_counter(count: Any, axis_name: AxisName, what: str) -> None:
    """Raises ValueError if workers may hold different step counters."""
    if varying := varying_axes(count) & set(axis_names(axis_name)):
        raise ValueError(
            f"the step counter of {what} varies over {', '.join(sorted(map(str, varying)))}: workers with "
            "different counters would wait for each other for ever. Pass opt_state with in_specs P() through "
            "jax.shard_map"
        )
