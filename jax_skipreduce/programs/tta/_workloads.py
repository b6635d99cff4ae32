"""A workload: a network, its loss, its examples, and which of its parameters matter most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jax_skipreduce.programs.common.batches import batches_of_worker
from jax_skipreduce.programs.tta._images import Examples, load_images
from jax_skipreduce.programs.tta._lm import ByteLM
from jax_skipreduce.programs.tta._settings import Settings, Size, WorkloadName
from jax_skipreduce.programs.tta._text import load_text
from jax_skipreduce.programs.tta._vgg import VGG


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a training learns.

    Attributes:
      model: a network.
      examples: what it learns and what it is tested with.
      score: function of (parameters, arrays of examples) -> the loss and the accuracy of each example, two float32
        arrays of shape (number of examples,).
      protect: regular expression for the paths of parameters that `selective-50` reduces in full.
    """

    model: nn.Module
    examples: Examples
    score: Callable[..., tuple[jax.Array, jax.Array]]
    protect: str

    def init(self, seed: Any) -> Any:
        """Parameters. Can be compiled once for all seeds."""
        return self.model.init(jax.random.key(seed), self.inputs(self.examples.train[0][:1]))

    def inputs(self, array: Any) -> jax.Array:
        """What the network takes, from the first array of examples."""
        return _pixels(array) if isinstance(self.model, VGG) else _bytes_before(array)


def load(settings: Settings) -> Workload:
    """The workload of these settings, with its data.

    Raises:
      FileNotFoundError, ValueError: the data are missing or damaged; the message says what to do.
    """
    examples = load_examples(settings)
    is_small = settings.size == Size.SMALL
    if settings.workload == WorkloadName.VGG:
        return of_images(VGG(((8,), (16,), (16,)), dense_size=512) if is_small else VGG(), examples)
    return of_text(ByteLM(size=64, num_layers=2, num_heads=4, hidden_size=128) if is_small else ByteLM(), examples)


def of_images(model: VGG, examples: Examples) -> Workload:
    """To tell what images show. Convolutions are protected, as in section 4.4."""
    return Workload(model, examples, lambda *args: _score_images(model, *args), protect="conv")


def of_text(model: ByteLM, examples: Examples) -> Workload:
    """To tell the next byte. What all bytes go through is protected: embedding, norms, head."""
    return Workload(model, examples, lambda *args: _score_text(model, *args), protect="embedding|norm|head")


def load_examples(settings: Settings) -> Examples:
    """The data alone."""
    if settings.workload == WorkloadName.VGG:
        return load_images(settings.data, settings.data_dir, settings.num_test)
    return load_text(settings.text, settings.text_dir, settings.num_test)


def deal_batches(examples: Examples, settings: Settings, seed: int, rank: int) -> tuple[np.ndarray, ...]:
    """The batches of a worker in the order in which it takes them.

    Each worker keeps its own random share of the training examples, and goes through it in a new order in each
    epoch.

    Returns:
      For each array of examples, one of shape (num_steps, batch_size, ..).

    Raises:
      ValueError: a worker holds less than a batch.
    """
    num_examples, num_workers = len(examples.train[0]), settings.num_workers
    chosen = batches_of_worker(num_examples, num_workers, rank, settings.batch_size, settings.num_steps, seed)
    return tuple(array[chosen] for array in examples.train)


def _pixels(images: Any) -> jax.Array:
    return jnp.asarray(images).astype(jnp.float32) / 255


def _bytes_before(windows: Any) -> jax.Array:
    return jnp.asarray(windows)[:, :-1].astype(jnp.int32)


def _score_images(model: VGG, params: Any, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits: Any = model.apply(params, _pixels(images))
    targets = labels.astype(jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses, (jnp.argmax(logits, -1) == targets).astype(jnp.float32)


def _score_text(model: ByteLM, params: Any, windows: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits: Any = model.apply(params, _bytes_before(windows))
    targets = windows[:, 1:].astype(jnp.int32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return losses.mean(-1), (jnp.argmax(logits, -1) == targets).astype(jnp.float32).mean(-1)
