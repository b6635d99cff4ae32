"""Reads IDX files, the format of MNIST and its kin: a header with the shape, then plain bytes.

Header: two zero bytes, the type of the elements (8: unsigned byte), the number of dimensions, and
each dimension as a big-endian 32-bit integer (http://yann.lecun.com/exdb/mnist).
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

_UNSIGNED_BYTE = 8


def read_idx(path: Path, num_dimensions: int) -> np.ndarray:
    """The array of unsigned bytes in an IDX file.

    Args:
      path: the file; it is unpacked if its name ends in ``.gz``.
      num_dimensions: that the array has to have.

    Returns:
      An array of uint8, read-only.

    Raises:
      ValueError: the file is damaged, or is not such an array.
      OSError: the file cannot be opened.
    """
    content = _unpacked(path)
    if len(content) < 4:
        raise ValueError(f"{path}: {len(content)} bytes, too short for the header of an IDX file")
    zeros, element_type, dimensions = struct.unpack(">HBB", content[:4])
    if zeros != 0 or element_type != _UNSIGNED_BYTE or dimensions != num_dimensions:
        raise ValueError(
            f"{path}: magic number 0x{content[:4].hex()}, expected 0x0000{_UNSIGNED_BYTE:02x}{num_dimensions:02x}: "
            f"an IDX file of unsigned bytes in {num_dimensions} dimension(s)"
        )
    header_bytes = 4 + 4 * num_dimensions
    if len(content) < header_bytes:
        raise ValueError(f"{path}: {len(content)} bytes, the file ends within its header")
    shape = struct.unpack(f">{num_dimensions}I", content[4:header_bytes])
    present, expected = len(content) - header_bytes, math.prod(shape)
    if present != expected:
        problem = "the file is cut off" if present < expected else "there is more in the file"
        raise ValueError(f"{path}: its header announces {shape}, {expected} bytes, but {present} follow: {problem}")
    return np.frombuffer(content, np.uint8, offset=header_bytes).reshape(shape)


def _unpacked(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be unpacked, the file is damaged or cut off ({error})") from None
