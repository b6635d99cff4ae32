"""What the workers write: cut into lines, prefixed by rank, shown or kept."""

from __future__ import annotations

import collections
import enum
import select
import sys
from collections.abc import Callable
from typing import TextIO

# A "line" without an end is shown in pieces of about this size.
_MAX_LINE_BYTES = 2**16
_NUM_LAST_LINES = 40


class Output(enum.StrEnum):
    """Whose output is shown while the workers run."""

    ALL = "all"
    FIRST = "first"
    FAILED = "failed"


class WorkerOutput:
    """The output of one worker. Bytes go in as they are read; whole lines come out.

    Args:
      rank: the worker's rank.
      show: called with lines as they come; None shows nothing. The last lines are kept in any case.
    """

    def __init__(self, rank: int, show: Callable[[str], None] | None):
        self.rank = rank
        self.is_shown = show is not None
        self._show = show
        self._last: collections.deque[str] = collections.deque(maxlen=_NUM_LAST_LINES)
        self._partial = b""

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._partial + data).split(b"\n")
        if len(rest) >= _MAX_LINE_BYTES:
            lines.append(rest)
            rest = b""
        self._partial = rest
        self._emit(lines)

    def close(self) -> None:
        """Ends the output: the last line may have no line end."""
        rest, self._partial = self._partial, b""
        if rest:
            self._emit([rest])

    def last_lines(self) -> str:
        return "".join(self._last)

    def _emit(self, lines: list[bytes]) -> None:
        texts = [f"[{self.rank}] {line.decode(errors='replace').removesuffix(chr(13))}\n" for line in lines]
        self._last.extend(texts)
        if self._show is not None and texts:
            self._show("".join(texts))


def write(stream: TextIO, text: str) -> None:
    """Writes at once, with ? for what the encoding lacks: a worker must not end the lab by writing an umlaut."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()


def is_ready(stream: TextIO) -> bool:
    """Whether a write would not wait, as it does in a full pipe that nobody reads."""
    try:
        return bool(select.select([], [stream], [], 0)[1])
    except (OSError, ValueError):
        return True  # There is no file beneath it, so nothing to wait for.


def say(message: str) -> None:
    """Writes a line of the launcher's own to stderr."""
    write(sys.stderr, f"skipreduce lab: {message}\n")
