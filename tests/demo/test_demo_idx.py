"""IDX files: read, and refused with a reason."""

import gzip
import struct

import numpy as np
import pytest

from jax_skipreduce.programs.common.idx import read_idx


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


@pytest.fixture
def images():
    return np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_reads_plain_and_packed_files(tmp_path, images, ending):
    path = tmp_path / f"images-idx3-ubyte{ending}"
    content = idx_bytes(images)
    path.write_bytes(gzip.compress(content) if ending else content)
    np.testing.assert_array_equal(read_idx(path, 3), images)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "0 bytes, too short"),
        (lambda content: b"\x00\x00\x08", "3 bytes, too short"),
        (lambda content: b"\x89PNG" + content[4:], "magic number 0x89504e47, expected 0x00000803"),
        (lambda content: b"\x00\x00\x0d\x03" + content[4:], "magic number 0x00000d03"),
        (lambda content: content[:10], "ends within its header"),
        (lambda content: content[:-1], r"announces \(3, 4, 5\), 60 bytes, but 59 follow: the file is cut off"),
        (lambda content: content + b"x", "61 follow: there is more"),
        (lambda content: content[:4] + b"\xff" * 12 + content[16:], "the file is cut off"),
    ],
)
def test_refuses_damaged_files(tmp_path, images, damage, message):
    path = tmp_path / "images-idx3-ubyte"
    path.write_bytes(damage(idx_bytes(images)))
    with pytest.raises(ValueError, match=message) as raised:
        read_idx(path, 3)
    assert str(path) in str(raised.value)


def test_refuses_another_number_of_dimensions(tmp_path, images):
    path = tmp_path / "labels-idx1-ubyte"
    path.write_bytes(idx_bytes(images))
    with pytest.raises(ValueError, match="expected 0x00000801"):
        read_idx(path, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-12],
        lambda packed: b"no gzip file",
        lambda packed: packed[:12] + bytes([packed[12] ^ 0xFF]) + packed[13:],
    ],
)
def test_refuses_damaged_packed_files(tmp_path, images, damage):
    path = tmp_path / "images-idx3-ubyte.gz"
    path.write_bytes(damage(gzip.compress(idx_bytes(images))))
    with pytest.raises(ValueError, match="cannot be unpacked"):
        read_idx(path, 3)
