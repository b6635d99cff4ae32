"""The launcher's side of a lab: starts process 1 of its namespaces, shows what the workers write, and ends them."""

from __future__ import annotations

import collections
import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from jax_skipreduce.programs.netlab._output import Output, WorkerOutput, is_ready, write
from jax_skipreduce.programs.netlab._script import UNSHARE
from jax_skipreduce.programs.netlab._signals import SignalError, Signals

_INSIDE = Path(__file__).with_name("_inside.py")


class LabError(RuntimeError):
    """A lab could not be made, or was killed from outside."""


class Lab:
    """One lab, from the first namespace to the last one gone. `_inside.py` describes what is sent to and fro.

    Attributes:
      failure: rank and status of the first worker that did not return 0. Negative: ended by a signal, as in subprocess.
      is_in_time: whether the workers ended before the time was over.
    """

    def __init__(self, num_workers: int, output: Output, signals: Signals):
        self.failure: tuple[int, int] | None = None
        self.is_in_time = True
        self._error: str | None = None
        self._has_result = False
        self._is_ending = False
        self._held: list[str] = []
        self._signals = signals
        is_shown = [output == Output.ALL or (output == Output.FIRST and rank == 0) for rank in range(num_workers)]
        self._outputs = [WorkerOutput(rank, self._show if shown else None) for rank, shown in enumerate(is_shown)]
        self._lines: collections.deque[bytes] = collections.deque()
        self._partial = b""

    def run(self, job: dict[str, Any]) -> None:
        """Runs a job, and returns when nothing of the lab is left.

        Raises:
          LabError: a command of the set-up failed, or the lab was killed from outside.
          SignalError: a signal came.
        """
        ours, theirs = socket.socketpair()
        # A session of its own, so that Ctrl-C reaches the launcher alone, which then ends the workers in good order.
        # setpriv: the kernel kills `unshare`, and so the lab, when the launcher dies.
        program = ("setpriv", "--pdeathsig", "KILL", *UNSHARE, sys.executable, "-IS", str(_INSIDE))
        with ours, theirs:
            process = subprocess.Popen(
                program, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
            theirs.close()
            try:
                # It may have ended already; then there is nothing to receive, and its status says why.
                with contextlib.suppress(ConnectionError):
                    ours.sendall(json.dumps(job).encode() + b"\n")
                while self._receive(ours, self._signals.raising()):
                    self._handle_all()
            finally:
                self._is_ending = True
                with contextlib.suppress(OSError):  # It has ended already.
                    ours.shutdown(socket.SHUT_WR)
                self._handle_all()
                while self._receive(ours, contextlib.nullcontext()):
                    self._handle_all()
                status = process.wait()
        if self._error is not None:
            raise LabError(self._error)
        if not self._has_result:
            raise LabError(
                f"the first process of the lab ended with status {status} before its workers had: it was killed from "
                "outside, or says above what is wrong"
            )

    def show_held(self) -> None:
        """Shows what workers wrote while they were ended.

        Not before the end: whoever reads our output may have stopped reading, and the lab ends nevertheless. A signal
        ends this wait too, and after a signal nobody is waited for.
        """
        held, self._held = self._held, []
        if self._signals.first is None or is_ready(sys.stdout):
            with contextlib.suppress(SignalError), self._signals.raising():
                write(sys.stdout, "".join(held))

    def unseen_lines(self, rank: int) -> str:
        """The last lines of a worker, if they were not shown."""
        output = self._outputs[rank]
        return "" if output.is_shown else output.last_lines()

    def _receive(self, channel: socket.socket, waiting: contextlib.AbstractContextManager[None]) -> bool:
        """Waits for events; False if there are no more."""
        try:
            with waiting:
                channel.recv(1, socket.MSG_PEEK)
            data = channel.recv(2**16)
        except ConnectionResetError:
            return False
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._lines.extend(lines)
        return bool(data)

    def _handle_all(self) -> None:
        # One by one off the queue: a signal may end the showing of one, and the others come later.
        while self._lines:
            self._handle(*json.loads(self._lines.popleft()))

    def _handle(self, kind: str, *event: Any) -> None:
        if kind == "output":
            rank, data = event
            self._outputs[rank].feed(data.encode("latin-1"))
        elif kind == "closed":
            self._outputs[event[0]].close()
        elif kind == "ending":
            self._is_ending = True
        elif kind == "result":
            failure, self.is_in_time, self._error = event
            self.failure = failure and (failure[0], failure[1])
            self._has_result = True

    def _show(self, text: str) -> None:
        if self._is_ending:
            self._held.append(text)
            return
        with self._signals.raising():
            write(sys.stdout, text)
