"""Local gradients: parameters marked so that their gradient stays on each worker, and the check.

Under ``shard_map(check_vma=True)`` the gradient with respect to parameters that came in as ``P()``
is summed over the workers before anybody sees it: there is nothing left to skip. Marked as varying
outside of the differentiated function, the same parameters have a local gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jax_skipreduce._backends.ppermute import Ring
from jax_skipreduce._gradients.selection import leaf_paths
from jax_skipreduce._workers import axes as _axes
from jax_skipreduce._workers.axes import AxisName


def local_params(params: Any, axis_name: AxisName) -> Any:
    """`params`, typed as differing between workers, so that gradients with respect to them are local.

    The values are the same and nothing is sent. Where JAX does not track what varies
    (``check_vma=False``, `vmap`, `pmap`), gradients are local already and this returns `params`.

    Call it outside of the function that is differentiated; `local_value_and_grad` does.

    Args:
      params: pytree of arrays.
      axis_name: the data axis, or a tuple of axes.

    Returns:
      A pytree of the same structure, shapes and dtypes.

    Raises:
      ValueError: an axis is not bound here.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jax.sharding import PartitionSpec as P
      >>> import jax_skipreduce as sr
      >>> def local_gradient(w, x):
      ...     return jax.grad(lambda w: jnp.sum(w * x))(sr.local_params(w, "data"))[None]
      >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
      >>> run = jax.shard_map(local_gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
      >>> run(jnp.ones(2), jax.device_put(jnp.arange(2.0), jax.NamedSharding(mesh, P("data"))))
      Array([[0., 1.]], dtype=float32)
    """
    return jax.tree.map(Ring.of(axis_name).local, params)


def local_value_and_grad(
    fun: Callable[..., Any],
    axis_name: AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` whose gradient is this worker's own, not yet reduced.

    `fun` computes the loss of the local batch, without collectives over `axis_name`: take
    ``lax.pmean(loss, axis_name)`` of the value afterwards, to report it.

    Args:
      fun: function of parameters and batch that returns a scalar (and, with `has_aux`, more).
      axis_name: the data axis, or a tuple of axes.
      argnums: positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns (loss, aux).

    Returns:
      A function with the arguments of `fun` that returns (loss, gradient), both local, or
      ((loss, aux), gradient).

    Raises:
      ValueError: when called, if an axis is not bound, or if the loss is reduced over the axis
        already (noticed under ``check_vma=True``).

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> loss = lambda w, x: jnp.sum(w * x)
      >>> grad = lambda x: sr.local_value_and_grad(loss, "data")(jnp.ones(2), x)[1]
      >>> jax.vmap(grad, axis_name="data")(jnp.arange(4.0).reshape(2, 2))
      Array([[0., 1.],
             [2., 3.]], dtype=float32)
    """
    value_and_grad = jax.value_and_grad(fun, argnums=argnums, has_aux=has_aux)
    positions = [operator.index(n) for n in (argnums if isinstance(argnums, Sequence) else (argnums,))]

    def local(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        ring = Ring.of(axis_name)
        if not all(-len(args) <= position < len(args) for position in positions):
            raise TypeError(
                f"argnums={argnums}: called with {len(args)} positional argument(s). What is differentiated has to be "
                "passed by position"
            )
        marked = list(args)
        for position in positions:
            marked[position] = jax.tree.map(ring.local, args[position])
        value, grads = value_and_grad(*marked, **kwargs)
        reduced = _reduced_over(value[0] if has_aux else value, ring)
        if reduced:
            raise ValueError(
                f"the loss is the same on all workers of {', '.join(map(repr, reduced))}: the "
                "function to differentiate reduces it already (psum or pmean), so its gradient would have the "
                "wrong scale. Return the loss of the local batch, and take lax.pmean of the value afterwards"
            )
        return value, grads

    return local


def _reduced_over(x: Any, ring: Ring) -> list[Any]:
    """Axes over which JAX knows `x` to be the same. Empty where it does not track that."""
    return [name for name in ring.names if name not in _axes.varying_axes(x)] if ring.tracked else []


def check_local(grads: Any, ring: Ring) -> None:
    """Raises ValueError, naming the leaf, if a gradient is reduced already; as far as JAX tracks that."""
    for path, leaf in zip(leaf_paths(grads), jax.tree.leaves(grads), strict=True):
        reduced = [] if leaf.dtype == jax.dtypes.float0 else _reduced_over(leaf, ring)
        if reduced:
            raise ValueError(
                f"the gradient {path!r} is already the same on all workers of {', '.join(map(repr, reduced))}, so "
                "there is nothing left to reduce: under shard_map(check_vma=True), jax.grad with respect to parameters "
                "that all workers share sums over them. Take local gradients with "
                f"sr.local_value_and_grad(loss_fn, {_shown(ring)}), and do not psum or pmean them before "
                "skipreduce, or in the loss. If you did all that, a wrapper around skipreduce (optax.MultiSteps, "
                "another skipreduce) handed it these: see docs/sharp-bits.md"
            )


def _shown(ring: Ring) -> str:
    return repr(ring.names[0] if len(ring.names) == 1 else ring.names)
