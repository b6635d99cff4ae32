"""Which examples of its own share each worker takes, step by step.

Both functions go through a share in a new order in each epoch, without the rest that fills no batch. They draw other
numbers. `local_batches` draws for all workers of one process at once. `batches_of_worker` draws for one worker, so
that a process of a lab needs no other's. Measurements that were published depend on the numbers of each.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np


def local_batches(shape: tuple[int, ...], batch_size: int, seed: int) -> Iterator[np.ndarray]:
    """Which images of its own each worker takes, step by step, without end.

    Args:
      shape: (num_workers, images per worker).
      batch_size: images per worker and step, at most as many as it holds.
      seed: of the order.

    Yields:
      int32 of shape (num_workers * batch_size,): positions within the worker's shard, worker by
      worker. Each epoch goes through the shard in a new order, without the rest that fills no batch.

    Raises:
      ValueError: a worker holds less than a batch.
    """
    num_workers, per_worker = shape
    if batch_size > per_worker:
        raise ValueError(f"batch_size={batch_size}: each worker holds only {per_worker} images")
    # Other numbers than those that dealt the images with the same seed.
    rng = np.random.default_rng((seed, 1))
    while True:
        order = rng.permuted(np.tile(np.arange(per_worker, dtype=np.int32), (num_workers, 1)), axis=1)
        for start in range(0, per_worker - batch_size + 1, batch_size):
            yield order[:, start : start + batch_size].reshape(-1)


def batches_of_worker(
    num_examples: int, num_workers: int, rank: int, batch_size: int, num_steps: int, seed: int
) -> np.ndarray:
    """The examples that worker `rank` takes: indices of shape (num_steps, batch_size).

    Each worker keeps its own random share of the examples.

    Raises:
      ValueError: a worker holds less than a batch.
    """
    per_worker = num_examples // num_workers
    if per_worker < batch_size:
        raise ValueError(
            f"batch_size={batch_size}: there are {num_examples} training examples, {per_worker} for each of "
            f"{num_workers} workers"
        )
    own = np.random.default_rng((seed, 0)).permutation(num_examples)[rank * per_worker :][:per_worker]
    order = np.random.default_rng((seed, 1, rank))
    batches_per_epoch = per_worker // batch_size
    num_epochs = -(-num_steps // batches_per_epoch)
    epochs = [
        order.permutation(own)[: batches_per_epoch * batch_size].reshape(-1, batch_size) for _ in range(num_epochs)
    ]
    return np.concatenate(epochs)[:num_steps]
