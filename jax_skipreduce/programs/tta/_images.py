"""The images of the workload `vgg`, all of 28x28 pixels."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from jax_skipreduce.programs.common import data
from jax_skipreduce.programs.common.data import DataName

SIDE = 28


@dataclasses.dataclass(frozen=True)
class Examples:
    """What is learnt and what is tested: arrays whose first dimension counts examples."""

    train: tuple[np.ndarray, ...]
    test: tuple[np.ndarray, ...]


def load_images(name: str, data_dir: str | None, num_test: int) -> Examples:
    """Images, uint8 of shape (num_images, 28, 28, 1), with labels, uint8.

    Args:
      name: of a set of images, see `DataName`. Smaller ones are magnified and framed in black.
      data_dir: folder of Fashion-MNIST, None for where Debian's package puts it.
      num_test: how many of the test images to use.

    Raises:
      FileNotFoundError, ValueError: files are missing or damaged; the message says what to do.
    """
    dataset = data.load(DataName(name), None if data_dir is None else Path(data_dir))
    train = (_fitted(dataset.train_images), dataset.train_labels.astype(np.uint8))
    # Test images come in no particular order, except those of scikit-learn, which a fixed seed has shuffled.
    test = (_fitted(dataset.test_images[:num_test]), dataset.test_labels[:num_test].astype(np.uint8))
    return Examples(train, test)


def _fitted(images: np.ndarray) -> np.ndarray:
    height, width = images.shape[1:3]
    if not 1 <= max(height, width) <= SIDE:
        raise ValueError(f"images have {height}x{width} pixels; expected at most {SIDE}x{SIDE}")
    factor = SIDE // max(height, width)
    pixels = np.round(images * 255).astype(np.uint8).repeat(factor, axis=1).repeat(factor, axis=2)
    missing = [SIDE - size for size in pixels.shape[1:3]]
    frame = [(size // 2, size - size // 2) for size in missing]
    return np.pad(pixels, ((0, 0), *frame, (0, 0)))
