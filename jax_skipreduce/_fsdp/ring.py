"""An all-gather and a reduce-scatter around one ring, which goes through the workers in any of several orders.

`fsdp_gather` is made of both. Worker r owns slice r, in every order. The all-gather sends to the next worker on the
ring, the reduce-scatter to the worker before. Both leave out a number of steps, traced or known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jax_skipreduce._topologies.ring import ring_pairs
from jax_skipreduce._workers.channel import Channel
from jax_skipreduce._workers.loop import loop
from jax_skipreduce._workers.mean import accumulator


def ring_orders(num_workers: int, num_orders: int) -> np.ndarray:
    """Orders in which a ring goes through the workers, int32 of shape (M, N) with 1 <= M <= `num_orders`.

    Row m names the workers one after the other. Rows 2i and 2i + 1 are one ring, both ways. Row 0 is 0..N-1. The
    worker at place p lacks the slices of the workers at places p+1..p+k, so orders should spread distances on the ring.

    The orders are the strides modulo the first prime p that is N or more, without the numbers that are no ranks. There
    are p-1 orders. If N is prime, and all orders are used, each worker is d places after each other worker in exactly
    one order, for every d: any worker lacks any slice in k of N-1 orders. For other N the orders are nearly even.
    Strides modulo N itself would keep some workers apart: of 8, ranks that differ by 4 are 4 places apart in all four
    orders, so at k=4 they would never meet.
    """
    if num_workers <= 2:
        return np.arange(num_workers, dtype=np.int32)[None]
    prime = num_workers
    while not all(prime % divisor for divisor in range(2, prime)):
        prime += 1
    orders: list[np.ndarray] = []
    for stride in range(1, (prime + 1) // 2):
        forward = np.arange(prime) * stride % prime
        forward = forward[forward < num_workers]
        orders += [forward, forward[::-1]]
    return np.stack(orders[:num_orders]).astype(np.int32)


def gather(
    channel: Channel, orders: np.ndarray, order: int | jax.Array, skipped: int | jax.Array, own: jax.Array
) -> jax.Array:
    """The slices of all workers, shape (N, S), without the last `skipped` steps; zeros for what did not arrive.

    Args:
      channel: the workers, and what travels between them.
      orders: see `ring_orders`.
      order: the number of the order, an int or a traced integer.
      skipped: k, an int or a traced integer.
      own: this worker's slice, shape (S,).
    """
    if isinstance(skipped, int) and skipped == 0:
        return channel.group.local(channel.gather(own))
    return _any_order(_gather_in_order, channel, orders, order, skipped, channel.round(own))


def scatter(
    channel: Channel, orders: np.ndarray, order: int | jax.Array, skipped: int | jax.Array, rows: jax.Array
) -> jax.Array:
    """This worker's slice of the sum of `rows`, shape (N, S), without the first `skipped` steps.

    The sum is in float32 for the 16-bit floats, else in the dtype of `rows`.
    """
    # If all workers contribute, no order is better than the first.
    order = 0 if isinstance(skipped, int) and skipped == 0 else order
    return _any_order(_scatter_in_order, channel, orders, order, skipped, channel.group.local(rows))


def _any_order(
    run: Callable[..., jax.Array],
    channel: Channel,
    orders: np.ndarray,
    order: int | jax.Array,
    skipped: int | jax.Array,
    x: jax.Array,
) -> jax.Array:
    """``run(channel, orders[order], skipped, x)``; `order` may be traced."""
    if isinstance(skipped, int) and skipped == channel.group.size - 1:
        order = 0  # Nothing is sent.
    if isinstance(order, int):
        return run(channel, orders[order], skipped, x)
    # The pairs of a ppermute are part of the program, so each order has a branch of its own.
    branches = [functools.partial(run, channel, one, skipped) for one in orders]
    return lax.switch(order, branches, x)


def _places(order: np.ndarray, channel: Channel) -> tuple[jax.Array, Callable[[Any], jax.Array]]:
    """This worker's place on the ring, and a function of a place -> the worker at that place."""
    workers = jnp.asarray(order)
    place = jnp.asarray(np.argsort(order).astype(np.int32))[channel.group.rank]
    return place, lambda place: workers[place % channel.group.size]


def _gather_in_order(channel: Channel, order: np.ndarray, skipped: int | jax.Array, own: jax.Array) -> jax.Array:
    """The all-gather without its last steps, each worker sending to the one after it in `order`."""
    place, worker_at = _places(order, channel)

    def step(number: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        rows, passing = carry
        passing = channel.permute(passing, ring_pairs(order.tolist()))
        return lax.dynamic_update_index_in_dim(rows, passing, worker_at(place - number - 1), axis=0), passing

    empty = jnp.zeros((channel.group.size, *own.shape), own.dtype)
    rows = lax.dynamic_update_index_in_dim(empty, own, channel.group.rank, axis=0)
    return loop(0, channel.group.size - 1 - skipped, step, (rows, own))[0]


def _scatter_in_order(channel: Channel, order: np.ndarray, skipped: int | jax.Array, rows: jax.Array) -> jax.Array:
    """The reduce-scatter without its first steps, each worker sending to the one before it in `order`.

    In step s of k..N-2 each worker receives the partial sum of the slice N-2-s places before it, and adds its own part.
    The result is a sum, in float32 for the 16-bit floats.
    """
    place, worker_at = _places(order, channel)
    wide = accumulator(rows.dtype)

    def own(number: Any) -> jax.Array:
        index = worker_at(place - (channel.group.size - 1 - number))
        return lax.dynamic_index_in_dim(rows, index, axis=0, keepdims=False).astype(wide)

    def step(number: Any, total: jax.Array) -> jax.Array:
        received = channel.permute(total.astype(rows.dtype), ring_pairs(order[::-1].tolist()))
        return received.astype(wide) + own(number + 1)

    return loop(skipped, channel.group.size - 1, step, own(skipped))
