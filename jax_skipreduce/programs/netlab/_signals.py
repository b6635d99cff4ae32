"""Ctrl-C, SIGTERM and SIGHUP while a lab is up: they end it in good order, and only then take their effect."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalError(Exception):
    """A signal came; `signum` says which."""

    def __init__(self, signum: int):
        super().__init__(f"received {signal.Signals(signum).name}")
        self.signum = signum


class Signals:
    """Keeps the signals that come, and raises only where nothing can be left half done.

    Attributes:
      first: the first that came, to be delivered in the end.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._pending: int | None = None
        self._may_raise = False

    def check(self) -> None:
        """Raises SignalError if a signal has come since the last time."""
        if self._pending is not None:
            signum, self._pending = self._pending, None
            raise SignalError(signum)

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """A stretch that may be interrupted anywhere, also while it waits."""
        self._may_raise = True
        try:
            self.check()
            yield
        finally:
            self._may_raise = False

    def handle(self, signum: int, _: FrameType | None) -> None:
        """The handler."""
        self.first = self.first or signum
        self._pending = signum
        if self._may_raise:
            self._may_raise = False
            self.check()


@contextlib.contextmanager
def held_back() -> Iterator[Signals]:
    """Signals, held back while the block runs; the one that came is delivered to the program afterwards.

    So a program that was to be ended by SIGTERM is, and Ctrl-C raises KeyboardInterrupt. What is ignored (nohup) stays
    ignored. Only the main thread gets signals: in another one, nothing is changed.
    """
    signals = Signals()
    previous = {}
    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            # None: a handler that was not set from Python, which could not be put back.
            if signal.getsignal(signum) not in (signal.SIG_IGN, None):
                previous[signum] = signal.signal(signum, signals.handle)
    try:
        yield signals
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
        if signals.first is not None:
            signal.raise_signal(signals.first)
