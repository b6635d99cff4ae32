"""The text of the workload `lm`: windows of bytes, of which the end of each document is held out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jax_skipreduce.programs.tta._images import Examples
from jax_skipreduce.programs.tta._novels import NOVELS_DIR, read_novels

# Bytes that are predicted in each window; it has one more, which the first is predicted from.
NUM_PREDICTED = 64

_HELD_OUT = 0.05


def load_text(text: str | None, text_dir: str | None, num_test: int) -> Examples:
    """Windows of text, uint8 of shape (num_windows, 65).

    Args:
      text: a UTF-8 file, one document; None: the novels.
      text_dir: folder of the novels, None for where Debian's package puts them.
      num_test: how many of the windows that are held out to use, evenly spread.

    Raises:
      FileNotFoundError, ValueError: files are missing, damaged, or too short; the message says what to do.
    """
    if text is None:
        documents, source = read_novels(NOVELS_DIR if text_dir is None else Path(text_dir)), "the novels"
    else:
        documents, source = [_read_text(Path(text))], text
    return make_windows(documents, num_test, source)


def make_windows(documents: Sequence[bytes], num_test: int, source: str) -> Examples:
    """Cuts documents in windows. The last 5 % of each are held out.

    Raises:
      ValueError: there is not one window of each kind.
    """
    train, test = [], []
    for document in documents:
        values = np.frombuffer(document, np.uint8)
        border = len(values) - max(NUM_PREDICTED + 1, round(len(values) * _HELD_OUT))
        train.append(_cut(values[: max(border, 0)]))
        test.append(_cut(values[max(border, 0) :]))
    all_train, all_test = np.concatenate(train), np.concatenate(test)
    if not len(all_train) or not len(all_test):
        raise ValueError(
            f"{source}: {sum(map(len, documents))} bytes, too short to cut a window of "
            f"{NUM_PREDICTED + 1} to learn and one to test"
        )
    chosen = np.unique(np.linspace(0, len(all_test) - 1, num_test).round().astype(int))
    return Examples((all_train,), (all_test[chosen],))


def _cut(values: np.ndarray) -> np.ndarray:
    size = NUM_PREDICTED + 1
    return values[: len(values) // size * size].reshape(-1, size)


def _read_text(path: Path) -> bytes:
    content = path.read_bytes()
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text ({error})") from None
    return content
