"""Trains a small convolutional network on N workers, with any reduction of the gradients."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jax_skipreduce as sr
from jax_skipreduce.programs.common.batches import local_batches
from jax_skipreduce.programs.common.data import NUM_CLASSES, Dataset, partition
from jax_skipreduce.programs.demo._settings import Optimizer, Settings

AXIS = "data"

_NUM_EVALUATIONS = 20
_STEPS_BETWEEN_REPORTS = 10
_FINAL_STEPS = 20

# Called with the number of steps done, the last loss, and the last test accuracy (None before the first).
OnProgress = Callable[[int, float, float | None], None]


class SmallCNN(nn.Module):
    """Two 3x3 convolutions and two dense layers; most parameters are in the first dense layer."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        """Images (batch, height, width, 1) -> logits (batch, classes)."""
        is_large = images.shape[1] > 16
        x = nn.relu(nn.Conv(32, (3, 3), strides=2 if is_large else 1)(images))
        if is_large:
            # From 28x28 to 7x7, about the 8x8 of the digits: the second convolution takes most of the time.
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.max_pool(x, (2, 2), (2, 2), padding="SAME")
        x = nn.relu(nn.Dense(128)(x.reshape(x.shape[0], -1)))
        return nn.Dense(NUM_CLASSES)(x)


@dataclasses.dataclass(frozen=True)
class Run:
    """One training.

    Attributes:
      seed: of the run.
      losses: of each step, the mean over the workers.
      evaluated_steps: after how many steps the test images were classified.
      accuracies: share of them that was right, at each of these.
      seconds: wall time of the training, with compilation and evaluation.
    """

    seed: int
    losses: tuple[float, ...]
    evaluated_steps: tuple[int, ...]
    accuracies: tuple[float, ...]
    seconds: float

    @property
    def final_loss(self) -> float:
        """Mean of the last steps: the loss of a single one depends on its images."""
        return statistics.fmean(self.losses[-_FINAL_STEPS:])

    @property
    def final_accuracy(self) -> float:
        """Accuracy in the last evaluation."""
        return self.accuracies[-1]


def full_reduction() -> optax.GradientTransformation:
    """What data-parallel training does without this library: `lax.pmean` of the local gradients."""
    return optax.stateless(lambda updates, _: lax.pmean(updates, AXIS))


def skipping(settings: Settings, seed: int) -> sr.SkipReduce:
    """`skipreduce` as the settings say."""
    return sr.SkipReduce(
        AXIS, settings.skip_ratio, mode=settings.mode.value, normalize=settings.normalize.value, seed=seed
    )


class Trainer:
    """Holds what trainings share: devices, network and images. `run` makes one training.

    Args:
      settings: of the comparison.
      dataset: images, which `run` deals to the workers.
      devices: one per worker.
    """

    def __init__(self, settings: Settings, dataset: Dataset, devices: Sequence[Any]) -> None:
        self._settings, self._dataset = settings, dataset
        self._mesh = jax.make_mesh((len(devices),), (AXIS,), (AxisType.Auto,), devices=devices)
        self._default_device = devices[0]
        self._model = SmallCNN()
        self._init = jax.jit(self._model.init)
        self._evaluate = self._make_evaluate()

    def describe(self) -> sr.Description:
        """What is skipped, and what goes over the wire."""
        shapes = jax.eval_shape(self._model.init, jax.random.key(0), self._dataset.train_images[:1])
        return skipping(self._settings, seed=0).describe(shapes, self._settings.num_workers)

    def run(self, reduction: optax.GradientTransformation, seed: int, on_progress: OnProgress) -> Run:
        """Trains from scratch. With the same seed everything but the reduction is the same."""
        settings, dataset = self._settings, self._dataset
        start = time.perf_counter()
        tx = optax.chain(reduction, _optimizer(settings))
        shards = partition(dataset.train_labels, settings.num_workers, settings.partition, seed)
        images, labels = self._place((dataset.train_images[shards.ravel()], dataset.train_labels[shards.ravel()]))
        # Not a mesh of accelerators but a single one may be JAX's default device.
        with jax.default_device(self._default_device):
            params = self._init(jax.random.key(seed), dataset.train_images[:1])
            state = (params, tx.init(params))
        params, opt_state = jax.device_put(state, NamedSharding(self._mesh, PartitionSpec()))
        train_step = self._make_train_step(tx)
        batches = local_batches(shards.shape, settings.batch_size, seed)

        losses: list[Any] = []
        evaluated_steps, accuracies = [], []
        interval = max(1, settings.num_steps // _NUM_EVALUATIONS)
        for step in range(1, settings.num_steps + 1):
            batch = self._place(next(batches))
            params, opt_state, loss = train_step(params, opt_state, batch, images, labels)
            losses.append(loss)
            if step % interval == 0 or step == settings.num_steps:
                evaluated_steps.append(step)
                accuracies.append(self._evaluate(params))
            if step % _STEPS_BETWEEN_REPORTS == 0 or step == settings.num_steps:
                on_progress(step, float(loss), accuracies[-1] if accuracies else None)
        numbers = tuple(float(loss) for loss in losses)
        return Run(seed, numbers, tuple(evaluated_steps), tuple(accuracies), time.perf_counter() - start)

    def _place(self, arrays: Any) -> Any:
        """Rows of the arrays -> the workers, each its own part."""
        return jax.device_put(arrays, NamedSharding(self._mesh, PartitionSpec(AXIS)))

    def _make_train_step(self, tx: optax.GradientTransformation) -> Callable[..., Any]:
        def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
            logits: Any = self._model.apply(params, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        def train_step(params: Any, opt_state: Any, batch: jax.Array, images: jax.Array, labels: jax.Array) -> Any:
            loss, grads = sr.local_value_and_grad(loss_fn, AXIS)(params, images[batch], labels[batch])
            updates, opt_state = tx.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state, lax.pmean(loss, AXIS)

        shared, own = PartitionSpec(), PartitionSpec(AXIS)
        specs = (shared, shared, own, own, own)
        return jax.jit(jax.shard_map(train_step, mesh=self._mesh, in_specs=specs, out_specs=shared))

    def _make_evaluate(self) -> Callable[[Any], float]:
        """A function of parameters: the share of test images that they classify correctly."""
        images, labels = self._dataset.test_images, self._dataset.test_labels
        num_images = len(labels)
        padding = -num_images % self._settings.num_workers
        # The label -1 is never right, so images that only fill up the last worker do not count.
        images = np.pad(images, ((0, padding), (0, 0), (0, 0), (0, 0)))
        images, labels = self._place((images, np.pad(labels, (0, padding), constant_values=-1)))

        def count_correct(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
            logits: Any = self._model.apply(params, images)
            return lax.psum(jnp.sum(jnp.argmax(logits, -1) == labels), AXIS)

        specs = (PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(AXIS))
        counter = jax.jit(jax.shard_map(count_correct, mesh=self._mesh, in_specs=specs, out_specs=PartitionSpec()))
        return lambda params: int(counter(params, images, labels)) / num_images


def _optimizer(settings: Settings) -> optax.GradientTransformation:
    if settings.optimizer == Optimizer.ADAM:
        return optax.adam(settings.learning_rate)
    return optax.sgd(settings.learning_rate, momentum=0.9)
