"""The optax transformation that runs a compressor. Every public reduction of this package is made of it."""

from __future__ import annotations

from typing import Any

import optax

from jax_skipreduce._transform.configuration import check_configuration
from jax_skipreduce._transform.settings import Settings
from jax_skipreduce._transform.sharded import reduce_local, reduce_stacked
from jax_skipreduce._transform.state import SkipReduceState, init_state
from jax_skipreduce._workers.axes import check_counter


def transformation(settings: Settings) -> optax.GradientTransformation:
    """A transformation of local gradients into their means, with state `SkipReduceState`."""

    def init(params: optax.Params) -> SkipReduceState:
        return init_state(settings, params)

    def update(
        updates: optax.Updates, state: Any, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SkipReduceState]:
        count = state.num_reductions
        check_configuration(settings, updates)
        if settings.mesh is None:
            check_counter(count, settings.all_axes, settings.compressor.name)
            reduced, kept = reduce_local(settings, updates, count, state.per_worker)
        else:
            reduced, kept = reduce_stacked(settings, updates, count, params, state.per_worker)
        return reduced, SkipReduceState(optax.safe_increment(count), kept)

    return optax.GradientTransformation(init, update)
