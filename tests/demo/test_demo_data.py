"""The images of the demo and how they are dealt."""

import gzip
import struct

import numpy as np
import pytest

from jax_skipreduce.programs.common.batches import local_batches
from jax_skipreduce.programs.common.data import DataName, Partition, load, partition

IMAGES = {"train": 24, "t10k": 8}


def write_dataset(folder, *, side=6, labels=10, packed=True):
    """Small files in the layout of Fashion-MNIST."""
    rng = np.random.default_rng(0)
    for prefix, count in IMAGES.items():
        arrays = {
            "images-idx3": rng.integers(0, 256, (count, side, side), dtype=np.uint8),
            "labels-idx1": np.arange(count, dtype=np.uint8) % labels,
        }
        for name, array in arrays.items():
            content = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()
            path = folder / f"{prefix}-{name}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder


def test_digits_are_split_the_same_way_every_time():
    first, second = load(DataName.DIGITS), load(DataName.DIGITS)
    assert first.train_images.shape == (1437, 8, 8, 1)
    assert first.test_images.shape == (360, 8, 8, 1)
    assert first.train_images.min() == 0
    assert first.train_images.max() == 1
    np.testing.assert_array_equal(first.test_images, second.test_images)
    counts = np.bincount(first.test_labels)
    assert counts.min() >= 34
    assert counts.max() <= 38


@pytest.mark.parametrize("packed", [True, False])
def test_reads_a_folder_of_idx_files(tmp_path, packed):
    dataset = load(DataName.FASHION_MNIST, write_dataset(tmp_path, packed=packed))
    assert dataset.train_images.shape == (24, 6, 6, 1)
    assert dataset.train_images.dtype == np.float32
    assert 0 <= dataset.train_images.min() < dataset.train_images.max() <= 1
    np.testing.assert_array_equal(dataset.test_labels, np.arange(8))


def test_missing_files_say_how_to_get_them(tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"apt-get install dataset-fashion-mnist.*--data-dir") as raised:
        load(DataName.FASHION_MNIST, tmp_path)
    assert "t10k-labels-idx1-ubyte" in str(raised.value)


def test_refuses_files_that_do_not_fit_together(tmp_path):
    write_dataset(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").replace(tmp_path / "train-labels-idx1-ubyte.gz")
    with pytest.raises(ValueError, match=r"24 images, but .* has 8 labels"):
        load(DataName.FASHION_MNIST, tmp_path)


def test_refuses_labels_and_sizes_out_of_range(tmp_path):
    write_dataset(tmp_path, labels=12)
    with pytest.raises(ValueError, match=r"label 11, expected 0\.\.9"):
        load(DataName.FASHION_MNIST, tmp_path)
    write_dataset(tmp_path, side=0)
    with pytest.raises(ValueError, match="no pixels"):
        load(DataName.FASHION_MNIST, tmp_path)


@pytest.mark.parametrize("how", Partition)
@pytest.mark.parametrize("num_workers", [2, 7, 8])
def test_shards_are_disjoint_and_of_one_size(how, num_workers):
    labels = load(DataName.DIGITS).train_labels
    shards = partition(labels, num_workers, how, seed=3)
    assert shards.shape == (num_workers, len(labels) // num_workers)
    assert len(np.unique(shards)) == shards.size
    assert len(labels) - shards.size < num_workers
    np.testing.assert_array_equal(shards, partition(labels, num_workers, how, seed=3))
    assert (shards != partition(labels, num_workers, how, seed=4)).any()


def test_by_class_gives_few_classes_to_each_worker():
    labels = load(DataName.DIGITS).train_labels
    by_class = partition(labels, 8, Partition.BY_CLASS, seed=0)
    assert max(len(np.unique(labels[shard])) for shard in by_class) <= 3
    iid = partition(labels, 8, Partition.IID, seed=0)
    assert min(len(np.unique(labels[shard])) for shard in iid) == 10


def test_refuses_more_workers_than_images():
    with pytest.raises(ValueError, match="num_workers=9: there are only 8"):
        partition(np.zeros(8, np.int32), 9, Partition.IID, seed=0)


def test_an_epoch_goes_through_each_shard_once():
    batches = local_batches((3, 10), 4, seed=0)
    epochs = [np.stack([next(batches).reshape(3, 4) for _ in range(2)], axis=1).reshape(3, 8) for _ in range(2)]
    for epoch in epochs:
        for worker in epoch:
            assert len(set(worker.tolist())) == 8
            assert set(worker.tolist()) <= set(range(10))
    assert (epochs[0] != epochs[1]).any()
    assert (epochs[0][0] != epochs[0][1]).any()


def test_a_batch_larger_than_a_shard_is_refused():
    with pytest.raises(ValueError, match="batch_size=11: each worker holds only 10"):
        next(local_batches((3, 10), 11, seed=0))
