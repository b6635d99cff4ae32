"""The methods of this package by name, for `describe`, bench and tta."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# name -> a class whose instances hold `settings`, made of (axis_name, **settings).
METHODS: dict[str, Callable[..., Any]] = {}


def register(cls: Any) -> Any:
    """Registers a method under its compressor's name; a decorator of its class.

    Raises:
      ValueError: the name is taken.
    """
    if cls.name in METHODS:
        raise ValueError(f"there is a method {cls.name!r} already")
    METHODS[cls.name] = cls
    return cls
