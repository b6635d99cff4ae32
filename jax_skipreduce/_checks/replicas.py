"""check_replicas(): compares fingerprints of the leaves, to see whether all workers still hold the same."""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from jax_skipreduce._gradients.paths import leaf_paths
from jax_skipreduce._workers.axes import AxisName, make_varying
from jax_skipreduce._workers.channel import Channel
from jax_skipreduce._workers.group import Group

# Odd numbers with bits all over, by which words are mixed: Knuth's golden ratio, and one of Murmur's hash.
_BY_POSITION, _BY_VALUE = 0x9E3779B1, 0x85EBCA6B


def check_replicas(tree: Any, axis_name: AxisName, what: str = "replicas") -> None:
    """Raises, while the program runs, if workers do not hold the same bits of `tree`.

    Parameters and optimizer states are the same on all workers as long as all workers start with the same values and
    apply the same means. A mistake (a checkpoint that one process read from elsewhere, another seed, a memory fault)
    shows up late, as a loss that does not fall. Call `check_replicas` in the training step, or in a program of its own
    that runs now and then. `check_every` compares parameters every so many steps, as part of an optax chain.

    Each worker computes a fingerprint of 32 bits of each leaf. The fingerprints are gathered and compared. If a leaf
    differs, the chance that the difference goes unnoticed is 2**-32.

    Bytes on the wire per worker: (N-1) * 4 * (number of leaves), one `lax.all_gather` (and one more where other mesh
    axes are manual). Each leaf is read once. All mesh axes have to be manual.

    Args:
      tree: pytree of arrays: what each worker holds. Floats, integers, bools and PRNG keys can be compared.
      axis_name: the data axis, or a tuple of axes, bound here.
      what: what the error calls the tree.

    Raises:
      ValueError: an axis is not bound, or another mesh axis is not manual (when traced).
      jax.errors.JaxRuntimeError: leaves differ. The error names the leaves, and the workers that are not with the
        majority. It comes out where the results of the program are waited for, on all workers, in a bounded time.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import jax_skipreduce as sr
      >>> def step(x):
      ...     sr.check_replicas({"w": x}, "data")
      ...     return x
      >>> jax.vmap(step, axis_name="data")(jnp.ones((4, 2))).shape  # four simulated workers agree
      (4, 2)
    """
    check_replicas_when(True, tree, axis_name, what)


def check_replicas_when(condition: bool | jax.Array, tree: Any, axis_name: AxisName, what: str) -> None:
    """`check_replicas` where `condition` is true. `condition` is the same on all workers."""
    paths, leaves = leaf_paths(tree), [jnp.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    paths = [path for path, leaf in zip(paths, leaves, strict=True) if leaf.size]
    leaves = [leaf for leaf in leaves if leaf.size]
    group = Group.of(axis_name)
    if not leaves or group.size == 1:
        return

    mesh = jax.sharding.get_abstract_mesh()
    manual = mesh.manual_axes
    if manual and (auto := [name for name in mesh.axis_names if name not in manual and mesh.shape[name] > 1]):
        raise ValueError(
            f"replicas (check_replicas, check_every) cannot be compared here: the mesh axes {auto} are not manual, and "
            "JAX calls back from fully manual programs alone. Give jax.shard_map all axes, or use mesh= (pjit programs)"
        )
    others = tuple(name for name in manual if name not in group.names)

    def complain(condition: np.ndarray, tables: np.ndarray) -> None:
        # One table per group of replicas; sharded parameters have several.
        found = [text for table in np.asarray(tables) if (text := _difference(table, paths, what))]
        if condition and found:
            raise RuntimeError(found[0])

    def gathered(leaves: list[jax.Array]) -> jax.Array:
        table = Channel(group).gather(jnp.stack([fingerprint(group.local(leaf)) for leaf in leaves]))
        if not others:
            return table[None]
        # All devices have to go on, or none: a device that went on alone would wait in its next collective.
        local = make_varying(table, others) if group.tracked else table
        return Channel(Group.of(others)).gather(local)

    def compare(leaves: list[jax.Array]) -> None:
        tables = gathered(leaves)
        # Where all is well, nothing leaves the device.
        lax.cond((tables != tables[:, :1]).any(), lambda: io_callback(complain, None, True, tables), lambda: None)

    if group.is_simulated:
        # Simulated by vmap, under which a callback cannot stand in a branch.
        io_callback(complain, None, condition, gathered(leaves))
    elif condition is True:
        compare(leaves)
    else:
        lax.cond(condition, lambda: compare(leaves), lambda: None)


def fingerprint(x: jax.Array) -> jax.Array:
    """A uint32 scalar that depends on every bit of `x` and on the place of the bit."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    words = _words(x)
    position = jnp.zeros((), jnp.uint32)
    # No flattening: it would gather an array that is sharded.
    for dimension, length in enumerate(words.shape):
        position = position * np.uint32(length) + lax.broadcasted_iota(jnp.uint32, words.shape, dimension)
    mixed = words ^ (position * np.uint32(_BY_POSITION) + np.uint32(1))
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 15)) * np.uint32(_BY_VALUE)
    return jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
    """The bits of `x` as uint32; wide ones as several, on a new last dimension."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype.name in ("int2", "uint2", "int4", "uint4"):
        x = x.astype(jnp.int8)
    if x.dtype == bool or x.dtype.itemsize < 4:
        if x.dtype != bool:
            x = lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)
        return x.astype(jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.uint32)


def _difference(table: np.ndarray, paths: list[str], what: str) -> str | None:
    """The difference in a table of fingerprints, in words; None if there is none. Rows are workers, columns leaves."""
    wrong: dict[tuple[int, ...], list[str]] = {}
    for path, column in zip(paths, table.T.tolist(), strict=True):
        (most, count), *others = collections.Counter(column).most_common()
        if others:
            # Without a majority no worker can be called right.
            alone = tuple(rank for rank, value in enumerate(column) if value != most)
            is_majority = count > len(column) - count
            wrong.setdefault(alone if is_majority else tuple(range(len(column))), []).append(path)
    if not wrong:
        return None
    parts = []
    for ranks, leaves in sorted(wrong.items()):
        named = ", ".join(map(repr, leaves[:5])) + (f" and {len(leaves) - 5} more" if len(leaves) > 5 else "")
        if len(ranks) == table.shape[0]:
            parts.append(f"{named} on all of {len(ranks)} workers, of which no majority agrees")
        else:
            parts.append(f"{named} on worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}")
    return (
        f"{what} differ: {'; '.join(parts)}. All workers have to start with the same and to apply the same updates: "
        "load one checkpoint on all, use one seed, and reduce everything that goes into an update"
    )
