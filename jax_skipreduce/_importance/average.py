"""track_importance(): the running average of importance, as an optax transformation."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._importance.importance import check_top_fraction, importance
from jax_skipreduce._workers.axes import AxisName, axis_names, varying_axes


class ImportanceState(NamedTuple):
    """State of `track_importance`. The same on all workers; it restores at any number of them.

    Attributes:
      count: int32 scalar, steps seen.
      num_averaged: int32 scalar, steps that are in the average.
      importance: pytree of float32 scalars: the average, as `choose_protected` takes it. Zeros before the first.
    """

    count: Any  # jax.Array; the name hides tuple.count, as in optax's own states
    num_averaged: Any
    importance: Any


def track_importance(
    axis_name: AxisName | None = None, *, every: int = 1, decay: float = 0.99, top_fraction: float = 0.25
) -> optax.GradientTransformation:
    """Averages `importance` over the steps of a training, and hands the gradients on as they are.

    It belongs right before `skipreduce`, where gradients are local:
    ``optax.chain(sr.track_importance("data", every=100), sr.skipreduce("data", 0.5), optax.adam(1e-3))``. In the state
    of the chain `ImportanceTracker` finds it, and so does ``optax.tree_utils.tree_get(opt_state, "importance")``.

    The average is the plain mean of the first 1 / (1 - decay) samples, and an exponential one from then on. A sample
    with gradients that are not finite is left out. A sample takes 31 passes over the gradients (float32) and, with
    `axis_name`, one all-reduce of 4 bytes per leaf; the steps in between take nothing.

    Args:
      axis_name: in `jax.shard_map`, `vmap` and `pmap`: the data axis or axes, over which the shares of the workers are
        averaged. None in pjit programs, where gradients are global arrays (with ``skipreduce(mesh=..)`` stacked by
        worker).
      every: steps from one sample to the next, counted from the first step.
      decay: of the average, in [0, 1]. 1 is the plain mean of all samples.
      top_fraction: as in `importance`.

    Returns:
      An `optax.GradientTransformation` with state `ImportanceState`.

    Raises:
      ValueError, TypeError: an argument is out of range (at once); gradients differ between workers and `axis_name`
        does not say so, or differ in structure from what the state was made for (when the step is traced).

    Example:
      >>> import jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> tx = sr.track_importance()
      >>> params = {"conv": jnp.zeros(2), "dense": jnp.zeros(2)}
      >>> state = tx.init(params)
      >>> for conv, dense in ((2.0, 1.0), (2.0, 1.0), (1.0, 2.0), (2.0, 1.0)):
      ...     _, state = tx.update({"conv": jnp.array([conv, 0.5]), "dense": jnp.array([dense, 0.5])}, state)
      >>> float(state.importance["conv"]), float(state.importance["dense"])
      (0.375, 0.125)

    References:
      SkipReduce, MICRO 2025: section 4.4; what its reviewers asked: does a choice after the first epoch hold?
    """
    if axis_name is not None:
        axis_names(axis_name)
    check_top_fraction(top_fraction)
    if isinstance(every, bool) or not isinstance(every, (int, np.integer)):
        raise TypeError(f"every={every!r} ({type(every).__name__}): expected an int, 1 or more")
    if every < 1:
        raise ValueError(f"every={every}: expected 1 or more steps from one sample to the next")
    if isinstance(decay, bool) or not isinstance(decay, (int, float, np.number)):
        raise TypeError(f"decay={decay!r} ({type(decay).__name__}): expected a number in [0, 1]")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay={decay}: expected a number in [0, 1]; 1 is the plain mean")

    def init(params: optax.Params) -> ImportanceState:
        zero = jnp.zeros([], jnp.int32)
        return ImportanceState(zero, zero, jax.tree.map(lambda _: jnp.zeros([], jnp.float32), params))

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ImportanceState]:
        del params
        before, after = jax.tree.structure(state.importance), jax.tree.structure(updates)
        if before != after:
            raise ValueError(f"gradients have the structure {after}, but the state was made for {before}")

        def sample(state: ImportanceState) -> ImportanceState:
            shares = importance(updates, top_fraction, axis_name=axis_name)
            _check_shared(shares, axis_name)
            return _averaged(state, shares, decay)

        # All workers hold the same counter, so all of them sample in the same steps.
        if every == 1:
            averaged = sample(state)
        else:
            averaged = lax.cond(state.count % every == 0, sample, lambda state: state, state)
        return updates, averaged._replace(count=optax.safe_increment(state.count))

    return optax.GradientTransformation(init, update)


def _averaged(state: ImportanceState, shares: Any, decay: float) -> ImportanceState:
    leaves = jax.tree.leaves(shares)
    if not leaves:
        return state
    is_finite = jnp.isfinite(jnp.sum(jnp.stack(leaves)))
    seen = state.num_averaged.astype(jnp.float32)
    weight = jnp.where(is_finite, jnp.maximum(1 / (seen + 1), jnp.float32(1 - decay)), jnp.float32(0))

    def mix(mean: jax.Array, share: jax.Array) -> jax.Array:
        return mean + weight * (jnp.where(is_finite, share, mean) - mean)

    num_averaged = jnp.where(is_finite, optax.safe_increment(state.num_averaged), state.num_averaged)
    return ImportanceState(state.count, num_averaged, jax.tree.map(mix, state.importance, shares))


def _check_shared(shares: Any, axis_name: AxisName | None) -> None:
    """Raises ValueError if JAX knows that shares differ between devices: each would keep a state of its own."""
    for path, share in zip(leaf_paths(shares), jax.tree.leaves(shares), strict=True):
        differs = sorted(map(str, varying_axes(share)))
        if differs:
            raise ValueError(
                f"axis_name={axis_name!r}: the importance of {path!r} differs along {', '.join(map(repr, differs))}, "
                "because the gradients do, and each device would keep an average of its own. Name every axis along "
                "which they differ, as in sr.track_importance('data')"
            )
