"""check_every(): the comparison of replicas as an optax transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jax_skipreduce._checks.processes import compare_once
from jax_skipreduce._checks.replicas import check_replicas_when
from jax_skipreduce._gradients.specs import checked_specs
from jax_skipreduce._workers.axes import AxisName, axis_names, check_counter
from jax_skipreduce._workers.ranges import check_int


class CheckEveryState(NamedTuple):
    """State of `check_every`.

    Attributes:
      num_steps: int32 scalar, steps made; the same on all workers.
    """

    num_steps: Any


def check_every(
    num_steps: int,
    axis_name: AxisName,
    *,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    param_specs: Any = None,
) -> optax.GradientTransformation:
    """Compares the parameters of all workers in every step that is a multiple of `num_steps`.

    The transformation hands updates on as they are, and may stand anywhere in a chain:
    ``optax.chain(sr.skipreduce("data"), optax.adam(1e-3), sr.check_every(1000, "data"))``. `update` needs `params`.
    Errors and bytes on the wire are those of `check_replicas`. In the steps between, nothing is sent.

    Args:
      num_steps: steps from one comparison to the next, 1 or more. The first step has a comparison.
      axis_name: all data axes, the fast ones included. All mesh axes have to be manual, or `mesh` given.
      mesh: for pjit programs: the mesh.
      param_specs: with `mesh`: the `PartitionSpec` of each parameter over the other axes, as in `skipreduce`.

    Returns:
      An `optax.GradientTransformation` with state `CheckEveryState`.

    Raises:
      ValueError, TypeError: an argument is out of range (at once); `params` is None, the counter differs between
        workers, or processes compare in different steps (when the step is traced).
      jax.errors.JaxRuntimeError: parameters differ (while the program runs); see `check_replicas`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jax_skipreduce as sr
      >>> tx = optax.chain(optax.sgd(1.0), sr.check_every(10, "data"))
      >>> params = jnp.ones(3)
      >>> state = tx.init(params)
      >>> step = lambda g: tx.update(g, state, params)[0]
      >>> jax.vmap(step, axis_name="data")(jnp.ones((4, 3))).shape  # four simulated workers agree
      (4, 3)
    """
    check_int("num_steps", num_steps, 1)
    names = axis_names(axis_name)
    if param_specs is not None and mesh is None:
        raise ValueError(
            f"param_specs={param_specs}: they go with mesh=, in pjit programs. Inside jax.shard_map, leave them out"
        )
    if mesh is not None and (missing := [name for name in names if name not in mesh.axis_names]):
        raise ValueError(f"axis_name={axis_name!r}: the mesh has no axis {missing}, only {mesh.axis_names}")

    def check_now(params: Any, count: Any) -> None:
        check_replicas_when(count % num_steps == 0, params, names, "parameters")

    def init(params: optax.Params) -> CheckEveryState:
        del params
        return CheckEveryState(jnp.zeros([], jnp.int32))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, CheckEveryState]:
        if params is None:
            raise ValueError(
                f"params=None: with sr.check_every({num_steps}, ..), call update(grads, state, params) with params"
            )
        # Workers that compare in different steps would wait for each other for ever.
        compare_once("check_every", lambda: {"check_every": f"{num_steps} steps over {names}"}, mesh, names)
        if mesh is None:
            check_counter(state.num_steps, names, "check_every")
            check_now(params, state.num_steps)
        else:
            # What each device holds, which the types of a pjit program take to be the same.
            specs = checked_specs(param_specs, params, [name for name in mesh.axis_names if name not in names], 0)
            jax.shard_map(
                check_now,
                mesh=mesh,
                in_specs=(specs, PartitionSpec()),
                out_specs=None,
                axis_names=set(mesh.axis_names),
            )(params, state.num_steps)
        return updates, CheckEveryState(optax.safe_increment(state.num_steps))

    return optax.GradientTransformation(init, update)
