"""Images and texts: read, cut, dealt, and refused with a reason."""

import gzip
import struct

import numpy as np
import pytest

from jax_skipreduce.programs.tta import _images, _novels, _text, _workloads
from jax_skipreduce.programs.tta._images import Examples
from tests.tta.novels import write_index, write_novels
from tests.tta.settings import make_settings

TEXTS = {
    "emma": ["EMMA", "", "Emma Woodhouse, handsome, clever, and rich,"],
    "abbey": ["Caf\u00e9", 'She said "no".'],
}


def test_novels_are_read_in_the_order_of_their_names(tmp_path):
    write_novels(tmp_path, TEXTS)
    abbey, emma = _novels.read_novels(tmp_path)
    assert emma == b"EMMA\n\nEmma Woodhouse, handsome, clever, and rich,\n"
    assert abbey == 'Caf\u00e9\nShe said "no".\n'.encode()


@pytest.mark.parametrize("missing", ["Rdata.rdx", "Rdata.rdb"])
def test_says_how_to_get_the_novels(tmp_path, missing):
    write_novels(tmp_path, TEXTS)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match="apt-get download r-cran-janeaustenr && dpkg -x") as raised:
        _novels.read_novels(tmp_path)
    assert f"{tmp_path} has no {missing}" in str(raised.value)


def damage_data(change):
    def damage(directory):
        path = directory / "Rdata.rdb"
        path.write_bytes(change(path.read_bytes()))

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda directory: (directory / "Rdata.rdx").write_bytes(b"no"), "Rdata.rdx: not the index"),
        (lambda directory: (directory / "Rdata.rdx").write_bytes(gzip.compress(b"X\nno")), "Rdata.rdx: not the index"),
        (lambda directory: write_index(directory, {"emma": np.array([0], np.int32)}), "Rdata.rdx: not the index"),
        (damage_data(lambda content: content[:-5]), "the file has .* it is cut off"),
        (damage_data(lambda content: content[:4] + b"??" + content[6:]), "cannot be unpacked, the file is damaged"),
        (damage_data(lambda content: struct.pack(">I", 7) + content[4:]), "but 7 are announced"),
    ],
)
def test_damaged_novels(tmp_path, damage, message):
    write_novels(tmp_path, {"emma": TEXTS["emma"]})
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        _novels.read_novels(tmp_path)


def test_variables_that_are_no_text(tmp_path):
    write_novels(tmp_path, {"numbers": [1.0, 2.0]})
    with pytest.raises(ValueError, match="numbers is not a vector of lines"):
        _novels.read_novels(tmp_path)


def test_windows_hold_out_the_end_of_each_document():
    documents = [bytes([letter]) * 65 * 40 + bytes([letter + 1]) * 65 * 3 for letter in (10, 20)]
    examples = _text.make_windows(documents, num_test=100, source="text")
    (train,), (test,) = examples.train, examples.test
    assert train.dtype == test.dtype == np.uint8
    assert train.shape == (2 * 40, 65)
    assert test.shape == (2 * 2, 65)
    assert {11, 21} <= set(test.ravel())
    assert set(train[:39].ravel()) == {10}
    few = _text.make_windows(documents, num_test=2, source="text").test[0]
    np.testing.assert_array_equal(few, test[[0, 3]])


def test_texts_that_do_not_do(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"x" * 100)
    with pytest.raises(ValueError, match="100 bytes, too short"):
        _text.load_text(str(path), None, 10)
    path.write_bytes(b"\xff" * 1000)
    with pytest.raises(ValueError, match="no UTF-8 text"):
        _text.load_text(str(path), None, 10)


def test_text_of_a_file_and_of_the_novels(tmp_path):
    lines = [f"line {i} of a text that is long enough to be cut" for i in range(50)]
    write_novels(tmp_path, {"one": lines})
    path = tmp_path / "text"
    path.write_text("\n".join(lines) + "\n")
    one, other = (_text.load_text(text, str(tmp_path), 4) for text in (str(path), None))
    np.testing.assert_array_equal(one.train[0], other.train[0])
    np.testing.assert_array_equal(one.test[0], other.test[0])


def test_digits_are_magnified_and_framed():
    examples = _images.load_images("digits", None, 100)
    images, labels = examples.train
    assert images.shape[1:] == examples.test[0].shape[1:] == (28, 28, 1)
    assert images.dtype == labels.dtype == np.uint8
    assert len(examples.test[0]) == len(examples.test[1]) == 100
    assert images[:, :2].max() == images[:, -2:].max() == images[:, :, :2].max() == 0
    inside = images[0, 2:-2, 2:-2, 0]
    np.testing.assert_array_equal(inside, inside[::3, ::3].repeat(3, axis=0).repeat(3, axis=1))
    assert images.max() == 255


def test_fashion_mnist(tmp_path):
    rng = np.random.default_rng(0)
    pixels = {}
    for prefix, count in (("train", 12), ("t10k", 5)):
        pixels[prefix] = rng.integers(0, 256, (count, 28, 28), np.uint8)
        labels = np.arange(count, dtype=np.uint8) % 10
        for kind, array in (("images-idx3", pixels[prefix]), ("labels-idx1", labels)):
            header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(header + array.tobytes()))
    examples = _images.load_images("fashion-mnist", str(tmp_path), 3)
    np.testing.assert_array_equal(examples.train[0][..., 0], pixels["train"])
    np.testing.assert_array_equal(examples.test[0][..., 0], pixels["t10k"][:3])
    np.testing.assert_array_equal(examples.train[1], np.arange(12) % 10)


def numbered(count):
    return Examples((np.arange(count), np.arange(count) * 2), (np.arange(2),))


def test_each_worker_keeps_its_own_share(tmp_path):
    settings = make_settings(tmp_path, num_steps=10, batch_size=4)
    dealt = [_workloads.deal_batches(numbered(50), settings, seed=3, rank=rank) for rank in range(4)]
    for first, second in dealt:
        assert first.shape == (10, 4)
        np.testing.assert_array_equal(first * 2, second)
    shares = [set(first.ravel().tolist()) for first, _ in dealt]
    assert all(len(share) == 12 for share in shares)
    assert len(set.union(*shares)) == 48
    # Three batches are an epoch, in which all of the share comes once.
    for epoch in range(3):
        assert set(dealt[0][0][3 * epoch : 3 * epoch + 3].ravel().tolist()) == shares[0]
    assert not np.array_equal(dealt[0][0][:3], dealt[0][0][3:6])


def test_seeds_deal_differently_and_always_alike(tmp_path):
    settings = make_settings(tmp_path)
    one, again, other = (_workloads.deal_batches(numbered(100), settings, seed, 1)[0] for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


def test_too_few_examples(tmp_path):
    with pytest.raises(ValueError, match="batch_size=8: there are 31 training examples, 7 for each of 4 workers"):
        _workloads.deal_batches(numbered(31), make_settings(tmp_path), 0, 0)
