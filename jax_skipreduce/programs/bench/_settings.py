"""What can be asked of the benchmark: lists and sizes as options spell them, and one frozen record of them all."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Sequence
from typing import TypeVar

Choice = TypeVar("Choice", bound=enum.StrEnum)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}


class Algorithm(enum.StrEnum):
    """Which way slices travel: the backends of `all_reduce`."""

    RING = "ring"
    NATIVE = "native"


class Mode(enum.StrEnum):
    """Where the ring skips."""

    STATIC = "static"
    RANDOM = "random"


class DType(enum.StrEnum):
    """Dtype of the message, or on the wire."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return 4 if self == DType.FLOAT32 else 2


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of one run.

    Attributes:
      sizes_bytes: of the message that each worker contributes.
      skips: numbers of reduce-scatter steps left out.
      modes: of the ring.
      wire_dtypes: what travels.
      dtype: of the message.
      num_rounds: in each of which every candidate is timed once.
      num_warmup_rounds: the same without a clock, before.
      is_checked: whether results are compared with what they have to be.
      seed: of the order of the candidates, the shifts and the messages.
      algorithms: members of `Algorithm`, and names of the library's methods.
    """

    sizes_bytes: tuple[int, ...]
    skips: tuple[int, ...]
    modes: tuple[Mode, ...]
    wire_dtypes: tuple[DType, ...]
    dtype: DType
    num_rounds: int
    num_warmup_rounds: int
    is_checked: bool
    seed: int
    algorithms: tuple[str, ...] = (Algorithm.RING,)


def parse_list(text: str) -> tuple[str, ...]:
    """The words between the commas of `text`, each once.

    Raises:
      ValueError: there is an empty one.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ValueError(f"{text!r} is not a list such as 1,2,3")
    return tuple(dict.fromkeys(words))


def parse_sizes(text: str, dtype: DType) -> tuple[int, ...]:
    """Message sizes in bytes, from a list such as ``64K,1M,1G`` (powers of 1024, as in nccl-tests).

    Raises:
      ValueError: one is not a size, or not a positive multiple of the bytes of one element.
    """
    sizes = []
    for word in parse_list(text):
        match = re.fullmatch(r"(\d+)([KMG]?)", word.upper(), re.ASCII)
        if match is None:
            raise ValueError(f"{word!r} is not a size: expected bytes, or a number with K, M or G, such as 64K,1M,1G")
        size_bytes = int(match[1]) * _UNITS[match[2]]
        if size_bytes == 0 or size_bytes % dtype.itemsize:
            raise ValueError(
                f"{word}: {size_bytes} bytes are no positive multiple of {dtype.itemsize}, the bytes of a {dtype.value}"
            )
        sizes.append(size_bytes)
    return tuple(dict.fromkeys(sizes))


def parse_skips(text: str, num_workers: int) -> tuple[int, ...]:
    """Numbers of skipped steps from a list such as ``0,2,4``, or from ``all``.

    Raises:
      ValueError: one is no number of steps that `num_workers` workers can skip.
    """
    if text.strip() == "all":
        return tuple(range(num_workers))
    for word in parse_list(text):
        if not re.fullmatch(r"\d+", word, re.ASCII) or int(word) >= num_workers:
            raise ValueError(
                f"{word} steps cannot be skipped: expected 0..{num_workers - 1} with {num_workers} workers, such as "
                f"0,{num_workers // 2}, or all"
            )
    return tuple(sorted({int(word) for word in parse_list(text)}))


def default_skips(num_workers: int) -> tuple[int, ...]:
    """None, a quarter, half and three quarters of N, rounded down."""
    return tuple(sorted({num_workers * quarters // 4 for quarters in range(4)}))


def parse_choices(text: str, kind: type[Choice]) -> tuple[Choice, ...]:
    """Members of `kind` from a list of their names.

    Raises:
      ValueError: one is no member.
    """
    return tuple(kind(word) for word in parse_names(text, [member.value for member in kind]))


def parse_names(text: str, names: Sequence[str]) -> tuple[str, ...]:
    """Some of `names`, from a list.

    Raises:
      ValueError: one is unknown.
    """
    for word in parse_list(text):
        if word not in names:
            raise ValueError(f"{word!r} is unknown: expected one or more of {', '.join(dict.fromkeys(names))}")
    return parse_list(text)
