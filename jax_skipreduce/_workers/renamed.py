"""renamed(): keyword arguments under an old name are refused with the new one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])


def renamed(**ways_out: str) -> Callable[[_Function], _Function]:
    """Makes a function raise TypeError for keyword arguments that it no longer takes.

    The signature, the docstring and the type of the function stay what they are.

    Args:
      **ways_out: for each old name the new name (``top_fraction="top_ratio"``), or a sentence that says what to do
        instead. A text with a space counts as a sentence.

    Returns:
      A decorator.

    Example:
      >>> @renamed(colour="color", check_every="use sr.check_every(..) in the chain")
      ... def draw(color="red"):
      ...     return color
      >>> draw(colour="blue")
      Traceback (most recent call last):
      TypeError: colour= is called color= since version 0.2
      >>> draw(check_every=5)
      Traceback (most recent call last):
      TypeError: check_every=: use sr.check_every(..) in the chain
    """

    def decorate(function: _Function) -> _Function:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for name in kwargs:
                if name in ways_out:
                    raise TypeError(_message(name, ways_out[name]))
            return function(*args, **kwargs)

        return cast(_Function, checked)

    return decorate


def _message(name: str, way_out: str) -> str:
    return f"{name}=: {way_out}" if " " in way_out else f"{name}= is called {way_out}= since version 0.2"
