"""Starts the workers, reads what they write, and ends them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

from jax_skipreduce.programs.netlab._commands import inside
from jax_skipreduce.programs.netlab._output import Output, WorkerOutput, is_ready, write
from jax_skipreduce.programs.netlab._plan import Worker
from jax_skipreduce.programs.netlab._processes import processes_in, send_signal
from jax_skipreduce.programs.netlab._signals import SignalError, Signals

_CHUNK_BYTES = 2**16


class _Running:
    """A worker's process with its output, until it has ended."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], pipe: IO[bytes], output: WorkerOutput):
        self.rank = rank
        self.process = process
        self.pipe = pipe
        self.output = output
        os.set_blocking(pipe.fileno(), False)
        # Becomes readable when the process ends.
        self.pidfd = os.pidfd_open(process.pid)

    def read(self) -> bytes:
        """A piece; nothing if there is none to be had, or the pipe is at its end."""
        try:
            return os.read(self.pipe.fileno(), _CHUNK_BYTES)
        except BlockingIOError:
            return b""


class Supervisor:
    """Of the workers of one lab, all in one thread: no lock, no reader that could be left behind.

    Attributes:
      failure: rank and status of the first worker that did not return 0, once `wait` has seen one. Negative: ended by a
        signal, as in subprocess.
    """

    def __init__(self, output: Output, signals: Signals):
        self.failure: tuple[int, int] | None = None
        self._output = output
        self._signals = signals
        self._selector = selectors.DefaultSelector()
        self._namespaces: list[str] = []
        self._running: dict[int, _Running] = {}
        self._outputs: dict[int, WorkerOutput] = {}
        self._is_ending = False
        self._held: list[str] = []

    def start(self, worker: Worker, command: Sequence[str], env: Mapping[str, str]) -> None:
        self._namespaces.append(worker.namespace)
        # A session of its own, so that Ctrl-C reaches the launcher alone, which then ends the workers in good order.
        process = subprocess.Popen(
            inside(worker.namespace, command).argv,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        is_shown = self._output == Output.ALL or (self._output == Output.FIRST and worker.rank == 0)
        output = self._outputs[worker.rank] = WorkerOutput(worker.rank, self._show if is_shown else None)
        running = self._running[worker.rank] = _Running(worker.rank, process, process.stdout, output)
        self._selector.register(running.pipe, selectors.EVENT_READ, (running, self._on_output))
        self._selector.register(running.pidfd, selectors.EVENT_READ, (running, self._on_exit))

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until all workers have returned 0, or one has failed; False if the time is over before.

        Raises:
          SignalError: a signal came.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._running and self.failure is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            with self._signals.raising():
                events = self._selector.select(left)
            self._handle(events)
        return True

    @contextlib.contextmanager
    def ending(self, grace_s: float) -> Iterator[None]:
        """However the block ends, no worker outlives it."""
        try:
            yield
        finally:
            self._end(grace_s)

    def _end(self, grace_s: float) -> None:
        """Asks all that runs in the lab to end, and kills what has not after `grace_s`."""
        self._is_ending = True
        send_signal(self._pids(), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while self._running and (left := deadline - time.monotonic()) > 0:
            self._handle(self._selector.select(left))
        for running in list(self._running.values()):
            running.process.kill()
            self._on_exit(running)
        self._selector.close()

    def show_held(self) -> None:
        """Shows what workers wrote while they were ended.

        Not then: whoever reads our output may have stopped reading, and nothing must keep a lab from being removed. A
        signal ends this wait too, and after one nobody is waited for.
        """
        held, self._held = self._held, []
        if self._signals.first is None or is_ready(sys.stdout):
            with contextlib.suppress(SignalError), self._signals.raising():
                write(sys.stdout, "".join(held))

    def unseen_lines(self, rank: int) -> str:
        """The last lines of a worker, if they were not shown."""
        output = self._outputs[rank]
        return "" if output.is_shown else output.last_lines()

    def _pids(self) -> set[int]:
        # A worker that has just started may not be in its namespace yet.
        return processes_in(self._namespaces) | {running.process.pid for running in self._running.values()}

    def _show(self, text: str) -> None:
        if self._is_ending:
            self._held.append(text)
            return
        with self._signals.raising():
            write(sys.stdout, text)

    def _handle(self, events: list[tuple[selectors.SelectorKey, int]]) -> None:
        for key, _ in events:
            running, handle = key.data
            # An earlier event of this round may have been its end.
            if running.rank in self._running:
                handle(running)

    def _on_output(self, running: _Running) -> None:
        data = running.read()
        if data:
            running.output.feed(data)
        else:
            self._forget(running.pipe)

    def _on_exit(self, running: _Running) -> None:
        # The books first: showing the output may be interrupted.
        del self._running[running.rank]
        self._forget(running.pipe)
        self._forget(running.pidfd)
        os.close(running.pidfd)
        status = running.process.wait()
        if status and self.failure is None and not self._is_ending:
            self.failure = (running.rank, status)
        with running.pipe:
            # All it wrote is in the pipe by now. A child of its own may hold the pipe open and go on writing, so there
            # may be no end to wait for: what the pipe can hold is enough.
            left = fcntl.fcntl(running.pipe, fcntl.F_GETPIPE_SZ)
            while left > 0 and (data := running.read()):
                left -= len(data)
                running.output.feed(data)
            running.output.close()

    def _forget(self, file: IO[bytes] | int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(file)
