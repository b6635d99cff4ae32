"""Local gradients: parameters marked so that their gradient stays on each worker, and the check.

Under ``shard_map(check_vma=True)`` the gradient with respect to parameters that came in as ``P()``
is summed over the workers before anybody sees it: there is nothing left to skip. Marked as varying
outside of the differentiated function, the same parameters have local gradients.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._workers.axes import AxisName, varying_axes
from jax_skipreduce._workers.group import Group


def local_params(params: Any, axis_name: AxisName) -> Any:
    """`params`, typed as differing between workers, so that gradients with respect to them are local.

    The values stay the same, and nothing is sent. Where JAX does not track what varies
    (``check_vma=False``, `vmap`, `pmap`), gradients are local already, and `params` come back as they are.

    Call the function outside of the function that is differentiated. `local_value_and_grad` does so.

    Args:
      params: pytree of arrays. Leaves that are no arrays (functions, strings, such as an Equinox module has) pass as
        they are.
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
    group = Group.of(axis_name)
    return jax.tree.map(lambda leaf: group.local(leaf) if _is_array(leaf) else leaf, params)


def local_value_and_grad(
    fun: Callable[..., Any],
    axis_name: AxisName,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    allow_int: bool = False,
) -> Callable[..., tuple[Any, Any]]:
    """`jax.value_and_grad` whose gradient is this worker's own, not yet reduced.

    `fun` computes the loss of the local batch, without collectives over `axis_name`. To report the loss, take
    ``lax.pmean(loss, axis_name)`` of the value afterwards.

    Args:
      fun: function of parameters and batch that returns a scalar (and, with `has_aux`, more).
      axis_name: the data axis, or a tuple of axes.
      argnums: positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns (loss, aux).
      allow_int: whether arguments may have integer leaves, as in `jax.value_and_grad`. Their gradients are float0.

    Returns:
      A function with the arguments of `fun` that returns (loss, gradient), both local, or
      ((loss, aux), gradient). Leaves that are no arrays (functions, strings and flags, such as an Equinox module has)
      reach `fun` as they are; their gradient is None, as from ``equinox.filter_grad``.

    Raises:
      ValueError: when called, if an axis is not bound, or if the loss is reduced over the axis
        already (noticed under ``check_vma=True``).
      TypeError: when called, if a leaf is an integer without `allow_int`. The error names the leaf.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> loss = lambda w, x: jnp.sum(w * x)
      >>> grad = lambda x: sr.local_value_and_grad(loss, "data")(jnp.ones(2), x)[1]
      >>> jax.vmap(grad, axis_name="data")(jnp.arange(4.0).reshape(2, 2))
      Array([[0., 1.],
             [2., 3.]], dtype=float32)
    """
    positions = [operator.index(n) for n in (argnums if isinstance(argnums, Sequence) else (argnums,))]

    @functools.wraps(fun)
    def local(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        group = Group.of(axis_name)
        if not all(-len(args) <= position < len(args) for position in positions):
            raise TypeError(
                f"argnums={argnums}: called with {len(args)} positional argument(s). What is differentiated has to be "
                "passed by position"
            )
        arrays, rest = list(args), {}
        for position in positions:
            leaves, structure = jax.tree.flatten(args[position])
            _check_differentiable(args[position], leaves, allow_int)
            rest[position] = structure, [None if _is_array(leaf) else _Held(leaf) for leaf in leaves]
            marked = [group.local(leaf) if _is_array(leaf) else None for leaf in leaves]
            arrays[position] = jax.tree.unflatten(structure, marked)

        @functools.wraps(fun)
        def of_arrays(*arrays: Any, **kwargs: Any) -> Any:
            whole = list(arrays)
            for position, (structure, held) in rest.items():
                given = structure.flatten_up_to(arrays[position])
                leaves = [leaf if hold is None else hold.value for leaf, hold in zip(given, held, strict=True)]
                whole[position] = jax.tree.unflatten(structure, leaves)
            return fun(*whole, **kwargs)

        value_and_grad = jax.value_and_grad(of_arrays, argnums=argnums, has_aux=has_aux, allow_int=allow_int)
        value, grads = value_and_grad(*arrays, **kwargs)
        if reduced := group.shared_over(value[0] if has_aux else value):
            raise ValueError(
                f"the loss is the same on all workers of {', '.join(map(repr, reduced))}: the "
                "function to differentiate reduces it already (psum or pmean), so its gradient would have the "
                "wrong scale. Return the loss of the local batch, and take lax.pmean of the value afterwards"
            )
        return value, grads

    return local


class _Held:
    """A leaf that is no array, on its way around the differentiation."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _is_array(leaf: Any) -> bool:
    """Whether `leaf` is an array, a number, or what JAX knows besides: for `jax.grad` to take or to refuse."""
    if isinstance(leaf, (str, bytes, bool)):
        return False
    return isinstance(leaf, (int, float, complex)) or any(
        hasattr(leaf, name) for name in ("dtype", "aval", "__jax_array__")
    )


def _check_differentiable(tree: Any, leaves: Sequence[Any], allow_int: bool) -> None:
    """Raises TypeError, naming the leaf, if JAX would not differentiate with respect to it."""
    for path, leaf in zip(leaf_paths(tree), leaves, strict=True):
        if allow_int or not isinstance(leaf, (jax.Array, np.ndarray, np.generic, int)) or isinstance(leaf, (str, bool)):
            continue
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                f"leaf {path!r} has dtype {jnp.result_type(leaf)}, which has no gradient. Leave it out of what is "
                "differentiated (with Equinox: eqx.partition(model, eqx.is_inexact_array)), take sr.local_params and "
                "jax.grad yourself, or give allow_int=True"
            )


def check_local(grads: Any, names: Sequence[Hashable], tracked: bool) -> None:
    """Raises ValueError, naming the leaf, if JAX knows that a gradient is reduced over `names` already."""
    if not tracked:
        return
    shown = repr(names[0] if len(names) == 1 else tuple(names))
    for path, leaf in zip(leaf_paths(grads), jax.tree.leaves(grads), strict=True):
        reduced = [name for name in names if leaf.dtype != jax.dtypes.float0 and name not in varying_axes(leaf)]
        if reduced:
            raise ValueError(
                f"the gradient {path!r} is already the same on all workers of {', '.join(map(repr, reduced))}, so "
                "there is nothing left to reduce: under shard_map(check_vma=True), jax.grad with respect to parameters "
                "that all workers share sums over them. Take local gradients with "
                f"sr.local_value_and_grad(loss_fn, {shown}), and do not psum or pmean them before "
                "skipreduce, or in the loss. If you did all that, a wrapper around skipreduce (optax.MultiSteps, "
                "another skipreduce) handed it these: see docs/sharp-bits.md"
            )
