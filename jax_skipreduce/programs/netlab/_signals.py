"""Ctrl-C, SIGTERM and SIGHUP while a lab is up: they end the lab in good order, and then have their usual effect."""

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
    """Keeps the signals that come, and raises only where the launcher waits.

    Attributes:
      first: the first signal that came, to be delivered in the end.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._pending: int | None = None
        self._may_raise = False

    @contextlib.contextmanager
    def raising(self) -> Iterator[None]:
        """Lets signals raise in the block, also while it waits, and on entry if one has come before."""
        self._may_raise = True
        try:
            self._check()
            yield
        finally:
            self._may_raise = False

    def handle(self, signum: int, _: FrameType | None) -> None:
        """Handles a signal, as set by `signal.signal`."""
        self.first = self.first or signum
        self._pending = signum
        if self._may_raise:
            self._may_raise = False
            self._check()

    def _check(self) -> None:
        """Raises SignalError if a signal has come and was not raised yet."""
        if self._pending is not None:
            signum, self._pending = self._pending, None
            raise SignalError(signum)


@contextlib.contextmanager
def held_back() -> Iterator[Signals]:
    """Holds signals back while the block runs, and delivers the first one that came afterwards.

    SIGTERM then ends the program, and Ctrl-C raises KeyboardInterrupt, as usual. Ignored signals (nohup) stay ignored.
    Only the main thread gets signals. In another thread nothing is changed.
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
