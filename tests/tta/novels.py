"""Writes texts as R keeps them in the data of a package."""

import gzip
import struct
import zlib

import numpy as np
import rdata


def serialise(value):
    """In R's serialisation."""
    return rdata.unparser.unparse_data(rdata.conversion.convert_python_to_r_data(value), file_type="rds")


def write_novels(directory, texts):
    """`texts`: lines by name. Returns the places of their blocks."""
    blocks, places, start = [], {}, 0
    for name, lines in texts.items():
        serialised = serialise(np.array(lines))
        block = struct.pack(">I", len(serialised)) + zlib.compress(serialised)
        places[name] = np.array([start, len(block)], np.int32)
        start += len(block)
        blocks.append(block)
    write_index(directory, places)
    (directory / "Rdata.rdb").write_bytes(b"".join(blocks))
    return places


def write_index(directory, places):
    index = {"variables": places, "references": {"none": np.array([0], np.int32)}, "compressed": np.array([True])}
    (directory / "Rdata.rdx").write_bytes(gzip.compress(serialise(index)))
