"""Data-parallel training in JAX over slow links: a ring all-reduce that leaves out some of its steps.

import jax_skipreduce as sr

tx = optax.chain(sr.skipreduce("data", skip_ratio=0.5), optax.adam(1e-3))
"""

import importlib
from typing import TYPE_CHECKING, Any

from jax_skipreduce._backends.native_info import NativeInfo, native_info
from jax_skipreduce._checks.check_every import CheckEveryState, check_every
from jax_skipreduce._checks.deadline import time_limit
from jax_skipreduce._checks.replicas import check_replicas
from jax_skipreduce._collectives.all_gather import all_gather
from jax_skipreduce._collectives.all_reduce import all_reduce
from jax_skipreduce._collectives.reduce_scatter import reduce_scatter
from jax_skipreduce._compressors.skipreduce import SkipReduce, skipreduce
from jax_skipreduce._forecast.describe import Description, LeafDescription, describe
from jax_skipreduce._forecast.metrics import metrics
from jax_skipreduce._fsdp.cut import fsdp_cut, fsdp_join
from jax_skipreduce._fsdp.gather import fsdp_gather
from jax_skipreduce._gradients.local import local_params, local_value_and_grad
from jax_skipreduce._gradients.selection import by_path
from jax_skipreduce._importance.choice import LeafImportance, Protection, choose_protected
from jax_skipreduce._importance.importance import importance
from jax_skipreduce._transform.state import SkipReduceState, state_specs

if TYPE_CHECKING:
    from jax_skipreduce.programs import netlab

__version__ = "0.2.0"

__all__ = [
    "CheckEveryState",
    "Description",
    "LeafDescription",
    "LeafImportance",
    "NativeInfo",
    "Protection",
    "SkipReduce",
    "SkipReduceState",
    "all_gather",
    "all_reduce",
    "by_path",
    "check_every",
    "check_replicas",
    "choose_protected",
    "describe",
    "fsdp_cut",
    "fsdp_gather",
    "fsdp_join",
    "importance",
    "local_params",
    "local_value_and_grad",
    "metrics",
    "native_info",
    "netlab",
    "reduce_scatter",
    "skipreduce",
    "state_specs",
    "time_limit",
]

_IN_THE_EXAMPLE = "it left the library in version 0.2, and is now a part of examples/importance.py"
_MOVED = {
    "ImportanceState": f"{_IN_THE_EXAMPLE}, as the argument `average` of averaged()",
    "ImportanceTracker": f"{_IN_THE_EXAMPLE}, as print_stability()",
    "track_importance": f"{_IN_THE_EXAMPLE}, as averaged(); sr.importance gives one sample",
}


def __getattr__(name: str) -> Any:
    # Imported where it is used, because netlab is for Linux alone.
    if name == "netlab":
        return importlib.import_module("jax_skipreduce.programs.netlab")
    if name in _MOVED:
        raise AttributeError(f"jax_skipreduce.{name}: {_MOVED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
