"""The methods of this package by name, for `describe`, bench and tta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# From a name to the class of the method. Instances are made with (axis_name, **settings), and hold `settings`.
METHODS: dict[str, Callable[..., Any]] = {}


def register(cls: Any) -> Any:
    """Class decorator: registers a method under the name of its compressor.

    Raises:
      ValueError: the name is taken.
    """
    if cls.name in METHODS:
        raise ValueError(f"there is a method {cls.name!r} already")
    METHODS[cls.name] = cls
    return cls
