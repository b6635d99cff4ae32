"""Jane Austen's six novels, from Debian's package r-cran-janeaustenr.

R keeps the data of a package in two files: `Rdata.rdx`, a packed list that says where each variable is, and
`Rdata.rdb`, one block after the other, each the length of its content (32 bits, big-endian) and zlib's stream of the
variable in R's serialisation, here a vector of lines.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path
from typing import Any

NOVELS_DIR = Path("/usr/lib/R/site-library/janeaustenr/data")


def read_novels(directory: Path) -> list[bytes]:
    """The text of each variable in R's database in `directory`, as UTF-8, ordered by name.

    Raises:
      FileNotFoundError: it is not there.
      ValueError: it is damaged, or its variables are not texts.
      ModuleNotFoundError: `rdata` is not installed.
    """
    index_path, data_path = directory / "Rdata.rdx", directory / "Rdata.rdb"
    for path in (index_path, data_path):
        if not path.is_file():
            raise FileNotFoundError(
                f"{directory} has no {path.name}. On Debian and Ubuntu, without installing R: apt-get download "
                "r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb novels, then --text-dir "
                "novels/usr/lib/R/site-library/janeaustenr/data; or take any other text with --text FILE"
            )
    try:
        variables = _decoded(gzip.decompress(index_path.read_bytes()))["variables"]
        places = {str(name): (int(start), int(num_bytes)) for name, (start, num_bytes) in variables.items()}
    except (
        OSError,
        EOFError,
        zlib.error,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        NotImplementedError,
    ) as error:
        raise ValueError(f"{index_path}: not the index of R's database, or damaged ({error})") from None
    if not places:
        raise ValueError(f"{index_path}: the database is empty")
    content = data_path.read_bytes()
    return [_text(content, *places[name], where=f"{data_path}: {name}") for name in sorted(places)]


def _text(content: bytes, start: int, num_bytes: int, where: str) -> bytes:
    block = content[start : start + num_bytes]
    if len(block) < max(num_bytes, 4):
        raise ValueError(
            f"{where} is to end at byte {start + num_bytes}, but the file has {len(content)}: it is cut off"
        )
    (expected,) = struct.unpack(">I", block[:4])
    try:
        serialised = zlib.decompress(block[4:])
    except zlib.error as error:
        raise ValueError(f"{where} cannot be unpacked, the file is damaged ({error})") from None
    if len(serialised) != expected:
        raise ValueError(f"{where} has {len(serialised)} bytes, but {expected} are announced: the file is damaged")
    try:
        # Numbers cannot be joined.
        return "\n".join(_decoded(serialised)).encode() + b"\n"
    except (TypeError, ValueError, NotImplementedError, IndexError, EOFError) as error:
        raise ValueError(f"{where} is not a vector of lines, or damaged ({error})") from None


def _decoded(serialised: bytes) -> Any:
    """What R's serialisation holds."""
    # Only who learns the novels needs it, and it brings pandas along.
    import rdata

    return rdata.conversion.convert(rdata.parser.parse_data(serialised, extension=".rds"))
