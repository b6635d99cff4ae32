"""metrics(): what skipreduce does at this step, as numbers for a logger."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
from jax.core import Tracer

from jax_skipreduce._forecast.describe import describe
from jax_skipreduce._transform.skipreduce import SkipReduceState


def metrics(
    opt_state: Any,
    params: Any,
    num_workers: int,
    tx: optax.GradientTransformation,
    *,
    num_fast_workers: int | None = None,
) -> dict[str, float]:
    """What `skipreduce` does in the step that comes next: plain numbers, ready for any logger.

    Ratio and k follow from the step counter, bytes from the shapes of `params`: nothing is run or sent, and nothing
    has to be kept in the state. It takes up to a millisecond per leaf, so call it where you log.

    Args:
      opt_state: of the optimizer, outside of `jax.jit`: a state of `skipreduce`, or anything that holds one, such as
        that of an `optax.chain`.
      params: the parameters, or their shapes.
      num_workers: N, as in `describe`.
      tx: what `skipreduce` returned (not the chain that it is part of).
      num_fast_workers: as in `describe`.

    Returns:
      A dict of Python numbers:

      - ``skipreduce/step``: steps made.
      - ``skipreduce/skip_ratio``: share of the steps of reduce-scatter that is left out, k/N; the most of any leaf.
      - ``skipreduce/num_skipped``: k; the most of any leaf.
      - ``skipreduce/left_out``: share of the gradient that each worker leaves out, protected leaves counted.
      - ``skipreduce/bytes_sent``: by each worker in this step.
      - ``skipreduce/bytes_saved``: against a plain ring all-reduce.
      - ``skipreduce/theoretical_speedup``: of the all-reduce.

    Raises:
      ValueError: `opt_state` holds no state of `skipreduce`, or more than one.
      TypeError: the counter is traced, or an argument is wrong as in `describe`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jax_skipreduce as sr
      >>> params = {"kernel": jnp.zeros((784, 128)), "bias": jnp.zeros(128)}
      >>> reduction = sr.skipreduce("data", optax.linear_schedule(0.0, 0.5, 100))
      >>> tx = optax.chain(reduction, optax.adam(1e-3))
      >>> sr.metrics(tx.init(params), params, 8, reduction)["skipreduce/num_skipped"]
      0
    """
    states = [state for state in jax.tree.leaves(opt_state, is_leaf=_is_state) if _is_state(state)]
    if len(states) != 1:
        raise ValueError(
            f"opt_state holds {len(states)} states of skipreduce: expected one. Give that of the optimizer which tx is "
            "part of; of several, one at a time"
        )
    count = states[0].count
    if isinstance(count, Tracer):
        raise TypeError("the step counter is traced: call sr.metrics outside of jax.jit, on the state that comes out")
    if isinstance(count, jax.Array) and not count.is_fully_addressable:
        count = count.addressable_data(0)  # of several processes; all have the same
    step = int(np.asarray(count).reshape(-1)[0])
    description = describe(params, num_workers, tx, count=step, num_fast_workers=num_fast_workers)
    num_elements = description.num_elements
    most = max((leaf.num_skipped for leaf in description.leaves), default=0)
    return {
        "skipreduce/step": step,
        "skipreduce/skip_ratio": most / num_workers,
        "skipreduce/num_skipped": most,
        "skipreduce/left_out": description.num_skipped_elements / num_elements if num_elements else 0.0,
        "skipreduce/bytes_sent": description.wire_bytes,
        "skipreduce/bytes_saved": description.full_wire_bytes - description.wire_bytes,
        "skipreduce/theoretical_speedup": description.theoretical_speedup,
    }


def _is_state(state: Any) -> bool:
    return isinstance(state, SkipReduceState)
