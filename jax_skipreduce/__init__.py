"""Data-parallel training in JAX over slow links: a ring all-reduce that leaves out some of its steps.

import jax_skipreduce as sr

tx = optax.chain(sr.skipreduce("data", skip_ratio=0.5), optax.adam(1e-3))
"""

from jax_skipreduce._collectives import all_gather, all_reduce, reduce_scatter
from jax_skipreduce._describe import Description, LeafDescription, describe
from jax_skipreduce._local import local_params, local_value_and_grad
from jax_skipreduce._selection import by_path
from jax_skipreduce._transform import SkipReduceState, skipreduce

__version__ = "0.1.0"

__all__ = [
    "Description",
    "LeafDescription",
    "SkipReduceState",
    "all_gather",
    "all_reduce",
    "by_path",
    "describe",
    "local_params",
    "local_value_and_grad",
    "reduce_scatter",
    "skipreduce",
]
