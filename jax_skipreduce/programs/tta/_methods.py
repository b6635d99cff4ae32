"""The methods that are compared, by name.

One more is one function with a decorator::

    @method("mine", "what it does")
    def _mine(context: Context) -> optax.GradientTransformation: ...

Each method that a compressor registers with the library (`jax_skipreduce._transform.registry`) is found as well, by its
name and with its defaults.

A method takes local gradients and gives the same mean on all workers. It calls collectives as attributes of `jax.lax`,
where the break-down can put stand-ins in their place. So the ring is that of ``backend="xla"``. What is random depends
on the state, not on a seed that is known when the step is traced: each method is compiled once for all seeds.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

import jax_skipreduce as sr
from jax_skipreduce.programs.common import methods
from jax_skipreduce.programs.tta._settings import MAX_STEPS

_COUNTS_PER_SEED = MAX_STEPS + 1


@dataclasses.dataclass(frozen=True)
class Context:
    """What a method may know of the training.

    Attributes:
      axis_name: the data axis.
      num_workers: N.
      num_steps: of each run.
      protect: regular expression for the paths of the parameters that `selective-*` reduces in full.
    """

    axis_name: str
    num_workers: int
    num_steps: int
    protect: str


@dataclasses.dataclass(frozen=True)
class Method:
    """A way to reduce gradients.

    Attributes:
      name: as options, tables and figures call it.
      description: one line.
      make: gives the transformation.
    """

    name: str
    description: str
    make: Callable[[Context], optax.GradientTransformation]


METHODS: dict[str, Method] = {}

DEFAULT_METHODS = (
    *("psum", "psum-flat", "psum-bf16", "skip-50", "skip-75", "skip-50-bf16", "selective-50", "warmup-50"),
)
QUICK_METHODS = ("psum", "skip-50", "skip-50-bf16")

# All others are compared with it.
BASELINE = "psum"


def method(name: str, description: str) -> Callable[[Callable], Callable]:
    """Registers the decorated function, which makes a transformation.

    Raises:
      ValueError: the name is taken.
    """

    def register(make: Callable[[Context], optax.GradientTransformation]) -> Callable:
        if name in METHODS:
            raise ValueError(f"name={name!r}: there is a method of this name already")
        METHODS[name] = Method(name, description, make)
        return make

    return register


def find(name: str) -> Method:
    """The method called `name`, of this module or of the library.

    Raises:
      ValueError: there is none.
    """
    if name in METHODS:
        return METHODS[name]
    if name not in methods.names():
        raise ValueError(
            f"there is no method {name!r}; there are {', '.join(dict.fromkeys((*METHODS, *methods.names())))}"
        )
    return Method(name, f"the compressor {name}, with its defaults", lambda context: _of_library(name, context))


def _of_library(name: str, context: Context) -> optax.GradientTransformation:
    # Native kernels call no collective of `jax.lax`, so the break-down could not replace them.
    has_backend = "backend" in inspect.signature(methods.METHODS[name]).parameters
    return methods.make(name, context.axis_name, **{"backend": "xla"} if has_backend else {}).transform()


def start_count(opt_state: Any, seed: int) -> Any:
    """`opt_state` with the step counter of `skipreduce` where the run of this seed starts.

    The shifts follow from the counter, so runs of different seeds skip different slices, although the program and
    its `seed` are the same. The counters of optax stay at 0.
    """

    def is_ours(state: Any) -> bool:
        return isinstance(state, sr.SkipReduceState)

    def start(state: Any) -> Any:
        # The counter is an int32.
        first = seed * _COUNTS_PER_SEED % 2**31
        return state._replace(num_reductions=jnp.asarray(first, jnp.int32)) if is_ours(state) else state

    return jax.tree.map(start, opt_state, is_leaf=is_ours)


@method("psum", "lax.pmean of the gradients as they are: what JAX programs do")
def _psum(context: Context) -> optax.GradientTransformation:
    return optax.stateless(lambda updates, _: lax.pmean(updates, context.axis_name))


@method("psum-flat", "lax.pmean of all gradients joined in one vector: a long one takes less time than many short ones")
def _psum_flat(context: Context) -> optax.GradientTransformation:
    def mean(updates: Any, _: Any) -> Any:
        vector, split = ravel_pytree(updates)
        return split(lax.pmean(vector, context.axis_name))

    return optax.stateless(mean)


@method("psum-bf16", "lax.pmean in bfloat16, which XLA's CPU backend sends as float32")
def _psum_bf16(context: Context) -> optax.GradientTransformation:
    def mean(updates: Any, _: Any) -> Any:
        halves = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), updates)
        means = lax.pmean(halves, context.axis_name)
        return jax.tree.map(lambda mean, leaf: mean.astype(leaf.dtype), means, updates)

    return optax.stateless(mean)


def _register_skipping(name: str, description: str, **arguments: Any) -> None:
    @method(name, description)
    def make(context: Context) -> optax.GradientTransformation:
        return sr.skipreduce(context.axis_name, backend="xla", **arguments)


_register_skipping("skip-0", "the ring, nothing skipped", skip_ratio=0.0)
_register_skipping("skip-25", "a quarter skipped", skip_ratio=0.25)
_register_skipping("skip-50", "half skipped", skip_ratio=0.5)
_register_skipping("skip-75", "three quarters skipped", skip_ratio=0.75)
_register_skipping("skip-0-bf16", "the ring, sent in bfloat16", skip_ratio=0.0, wire_dtype="bfloat16")
_register_skipping("skip-50-bf16", "half skipped, the rest sent in bfloat16", skip_ratio=0.5, wire_dtype="bfloat16")


@method("selective-50", "half skipped; convolutions, or embedding, norms and head, in full")
def _selective(context: Context) -> optax.GradientTransformation:
    return sr.skipreduce(context.axis_name, 0.5, protect=sr.by_path(context.protect), backend="xla")


@method("warmup-50", "nothing skipped in the first tenth of the steps, then half")
def _warmup(context: Context) -> optax.GradientTransformation:
    first = -(-context.num_steps // 10)

    def ratio(count: Any) -> jax.Array:
        # Steps of this run: the counter starts at a multiple.
        return jnp.where(count % _COUNTS_PER_SEED < first, 0.0, 0.5)

    # Adam remembers the size of gradients for a long time, and with "skip" they would get half as large.
    return sr.skipreduce(context.axis_name, ratio, normalize="drop", backend="xla")
