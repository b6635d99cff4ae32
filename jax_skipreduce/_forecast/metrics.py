"""metrics(): what skipreduce does in this step, as numbers for a logger."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jax_skipreduce._forecast.describe import forecast, settings_of
from jax_skipreduce._transform.state import states_in
from jax_skipreduce._workers.renamed import renamed


@renamed(tx="give the settings, sr.SkipReduce(..): a transformation does not know them")
def metrics(
    opt_state: Any,
    params: Any,
    num_workers: int | None,
    method: Any,
    *,
    num_fast_workers: int | None = None,
) -> dict[str, float]:
    """What `skipreduce` does in the step that comes next: plain numbers, ready for any logger.

    Ratio and k follow from the step counter, bytes from the shapes of `params`. Nothing is run or sent, and nothing
    has to be kept in the state. A call takes up to a millisecond per leaf, so call `metrics` where you log.

    Args:
      opt_state: the state of the optimizer, outside of `jax.jit`: a state of `skipreduce`, or anything that holds one,
        such as the state of an `optax.chain`.
      params: the parameters, or their shapes.
      num_workers: N, as in `describe`.
      method: the settings, such as ``sr.SkipReduce("data", 0.5)``, as in `describe`.
      num_fast_workers: as in `describe`.

    Returns:
      A dict of Python numbers:

      - ``skipreduce/step``: steps made.
      - ``skipreduce/skip_ratio``: k/N, the share that each worker leaves out of a leaf; the most of any leaf.
      - ``skipreduce/num_skipped``: k; the most of any leaf.
      - ``skipreduce/skipped_ratio``: share of the whole gradient that each worker leaves out, protected leaves counted.
      - ``skipreduce/bytes_sent``: bytes that each worker sends in this step.
      - ``skipreduce/bytes_saved``: bytes that each worker saves against a plain ring all-reduce.
      - ``skipreduce/theoretical_speedup``: the theoretical speed-up of the all-reduce.

    Raises:
      ValueError: `opt_state` holds no state of `skipreduce`, or more than one.
      TypeError: the counter is traced, or an argument is wrong as in `describe`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jax_skipreduce as sr
      >>> params = {"kernel": jnp.zeros((784, 128)), "bias": jnp.zeros(128)}
      >>> method = sr.SkipReduce("data", optax.linear_schedule(0.0, 0.5, 100))
      >>> tx = optax.chain(method.transform(), optax.adam(1e-3))
      >>> sr.metrics(tx.init(params), params, 8, method)["skipreduce/num_skipped"]
      0
    """
    settings, states = settings_of(method), states_in(opt_state)
    if len(states) != 1:
        raise ValueError(
            f"opt_state holds {len(states)} states of skipreduce: expected one. Give that of the optimizer which it is "
            "part of; of several, one at a time"
        )
    count = states[0].num_reductions
    if isinstance(count, Tracer):
        raise TypeError("the step counter is traced: call sr.metrics outside of jax.jit, on the state that comes out")
    if isinstance(count, jax.Array) and not count.is_fully_addressable:
        count = count.addressable_data(0)  # several processes, which all have the same counter
    step = int(np.asarray(count).reshape(-1)[0])
    description = forecast(settings, params, num_workers, step, num_fast_workers)
    num_elements = description.num_elements
    most = max((leaf.num_skipped for leaf in description.leaves), default=0)
    numbers = {
        "step": step,
        "skip_ratio": most / description.num_workers,
        "num_skipped": most,
        "skipped_ratio": description.num_skipped_elements / num_elements if num_elements else 0.0,
        "bytes_sent": description.wire_bytes,
        "bytes_saved": description.full_wire_bytes - description.wire_bytes,
        "theoretical_speedup": description.theoretical_speedup,
    }
    return {f"{settings.compressor.name}/{name}": value for name, value in numbers.items()}
