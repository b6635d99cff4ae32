"""Sets of images, and which worker holds which of them."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any

import numpy as np

from jax_skipreduce.programs.common.idx import read_idx

NUM_CLASSES = 10

# Where Debian's package dataset-fashion-mnist puts its files.
FASHION_MNIST_DIR = Path("/usr/share/datasets/fashion-mnist")


class DataName(enum.StrEnum):
    """A set of images."""

    DIGITS = "digits"
    FASHION_MNIST = "fashion-mnist"


class Partition(enum.StrEnum):
    """How the training images are dealt to the workers."""

    IID = "iid"
    BY_CLASS = "by-class"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images, float32 in [0, 1] of shape (num_images, height, width, 1), with int32 labels 0..9."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def load(name: DataName, data_dir: Path | None = None) -> Dataset:
    """The images called `name`. Nothing is fetched.

    Args:
      name: which.
      data_dir: where the files of Fashion-MNIST are; None: where Debian's package puts them.

    Raises:
      FileNotFoundError: files are missing; the message says how to get them.
      ValueError: a file is damaged, or files do not fit together.
    """
    return _load_digits() if name == DataName.DIGITS else _load_idx(data_dir or FASHION_MNIST_DIR)


def _load_digits() -> Dataset:
    """1797 handwritten digits of 8x8 pixels that come with scikit-learn, one in five for the test."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    images = (digits.images / 16).astype(np.float32)[..., None]
    labels = digits.target.astype(np.int32)
    # The same split in every run, so that accuracies can be compared.
    train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    return Dataset(images[train], labels[train], images[test], labels[test])


def _load_idx(directory: Path) -> Dataset:
    train_images, train_labels = _read_pair(directory, "train")
    test_images, test_labels = _read_pair(directory, "t10k")
    if train_images.shape[1:] != test_images.shape[1:]:
        raise ValueError(
            f"{directory}: training images have shape {train_images.shape[1:]}, test images {test_images.shape[1:]}"
        )
    return Dataset(train_images, train_labels, test_images, test_labels)


def _read_pair(directory: Path, prefix: str) -> tuple[np.ndarray, np.ndarray]:
    images_path = _find(directory, f"{prefix}-images-idx3-ubyte")
    labels_path = _find(directory, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(images_path, 3), read_idx(labels_path, 1)
    if len(images) != len(labels):
        raise ValueError(f"{images_path} has {len(images)} images, but {labels_path} has {len(labels)} labels")
    if images.size == 0:
        raise ValueError(f"{images_path}: no pixels, shape {images.shape}")
    if labels.max() >= NUM_CLASSES:
        raise ValueError(f"{labels_path}: label {labels.max()}, expected 0..{NUM_CLASSES - 1}")
    return (images.astype(np.float32) / 255)[..., None], labels.astype(np.int32)


def _find(directory: Path, name: str) -> Path:
    for path in (directory / f"{name}.gz", directory / name):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{directory} has no {name}.gz (nor {name}). On Debian and Ubuntu, apt-get install dataset-fashion-mnist "
        "puts the files in place; elsewhere, name the folder that holds them with --data-dir"
    )


def partition(labels: np.ndarray, num_workers: int, how: Partition, seed: int) -> np.ndarray:
    """Deals images to workers, each the same number, for the whole run.

    Args:
      labels: of all training images, shape (num_images,).
      num_workers: N.
      how: ``iid`` deals a shuffled deck. ``by-class`` sorts it by label first, so each worker sees
        few classes: the hardest case for a reduction that leaves workers out.
      seed: of the shuffle.

    Returns:
      Indices of shape (N, num_images // N), all different. The up to N-1 images that are left over
      are drawn at random.

    Raises:
      ValueError: there are more workers than images.
    """
    per_worker = len(labels) // num_workers
    if per_worker == 0:
        raise ValueError(f"num_workers={num_workers}: there are only {len(labels)} training images")
    deck = np.random.default_rng(seed).permutation(len(labels))[: per_worker * num_workers]
    if how == Partition.BY_CLASS:
        deck = deck[np.argsort(labels[deck], kind="stable")]
    return deck.reshape(num_workers, per_worker)
