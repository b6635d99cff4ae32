"""The shift of an iteration: random, new each step, and the same on all workers."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def step_keys(seed: int, count: jax.Array, num_buckets: int) -> jax.Array:
    """One PRNG key per bucket, from the seed and the step counter alone.

    No worker has to ask another worker (section 4.3): all workers hold the same counter.

    Args:
      seed: the run's seed.
      count: int32 scalar, the step.
      num_buckets: number of buckets B that are reduced in this step.

    Returns:
      Keys of shape (B,).
    """
    # Always Threefry, whatever jax_default_prng_impl says: the shifts are the same on every platform.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), count)
    # The key is folded again per bucket, so that buckets skip different workers in the same step.
    return jax.vmap(jax.random.fold_in, in_axes=(None, 0))(key, jnp.arange(num_buckets, dtype=jnp.uint32))


def random_shifts(seed: int, count: jax.Array, num_buckets: int, num_workers: int) -> jax.Array:
    """The shift of each bucket in step `count`: int32 of shape (num_buckets,), each 0..N-1."""
    keys = step_keys(seed, count, num_buckets)
    return jax.vmap(lambda key: jax.random.randint(key, (), 0, num_workers, jnp.int32))(keys)
