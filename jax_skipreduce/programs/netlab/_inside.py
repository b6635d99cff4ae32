"""Process 1 of a lab's namespaces: makes the links, runs the workers, and passes on what they write.

Python runs this file by its path, so it imports nothing of the package (which would import JAX). The launcher is at the
other end of the socket that is standard input. It sends a job, as one line of JSON, and closes its direction to ask for
the end. This process sends events, lists in JSON, one a line:

- `["output", rank, data]`: bytes that a worker wrote, as Latin-1.
- `["closed", rank]`: the worker has ended, and all of its output was sent.
- `["ending"]`: the workers are being ended.
- `["result", failure, is_in_time, error]`: the last event. `failure` is the rank and status of the first worker that
  did not return 0 (negative: killed by a signal, as in subprocess), `error` says which command of the set-up failed.

When this process ends, in whatever way, the kernel kills all that runs in the lab and removes its namespaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import time
from typing import Any

_CHUNK_BYTES = 2**16
# A killed process ends at once, unless it hangs in the kernel. The kernel then goes on without us.
_KILL_S = 10.0


class SetupError(Exception):
    """A command of the set-up failed; the message has the command and what it said."""


class Supervisor:
    """Runs one job, in one thread: no lock, no reader that could be left behind.

    Args:
      channel: the socket to the launcher.
    """

    def __init__(self, channel: socket.socket):
        self._channel = channel
        self._running: dict[int, tuple[int, int]] = {}  # Rank and output pipe, by process id.
        self._failure: tuple[int, int] | None = None
        self._is_ending = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        # Becomes readable when a process ends.
        self._wakeup, wakeup = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup, False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self, job: dict[str, Any]) -> None:
        is_in_time, error = True, None
        try:
            for command in job["setup"]:
                if self._is_asked_to_end():
                    return
                self._execute(command)
            for rank, (command, env) in enumerate(job["workers"]):
                self._start(rank, command, env)
            is_in_time = self._supervise(job["timeout_s"])
        except SetupError as failed:
            error = str(failed)
        self._end(job["grace_s"])
        self._send("result", self._failure, is_in_time, error)

    def _execute(self, command: str) -> None:
        result = subprocess.run(
            ["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
        if result.returncode:
            said = (result.stderr or result.stdout).strip() or f"status {result.returncode}"
            raise SetupError(f"{command}: {said}")

    def _start(self, rank: int, command: list[str], env: dict[str, str]) -> None:
        read, write = os.pipe()
        # A session of its own, so that a worker that signals its process group reaches no other worker.
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=write, stderr=subprocess.STDOUT, start_new_session=True
        )
        process.returncode = 0  # It is `_reap` that waits for it.
        os.close(write)
        os.set_blocking(read, False)
        self._running[process.pid] = rank, read
        self._selector.register(read, selectors.EVENT_READ, rank)

    def _supervise(self, timeout_s: float | None) -> bool:
        """Waits until all workers have returned 0, one has failed, or the launcher asks; False if the time is over."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while self._running and self._failure is None and not self._is_asked_to_end():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self._turn(left)
        return True

    def _end(self, grace_s: float) -> None:
        """Asks all that runs in the lab to end, and kills it after `grace_s`."""
        self._is_ending = True
        self._send("ending")
        # Asked once is enough; it would stay readable.
        self._selector.unregister(self._channel)
        for signum, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_S)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signum)  # All processes of the namespace, but not this one.
            deadline = time.monotonic() + patience_s
            while self._running and (left := deadline - time.monotonic()) > 0:
                self._turn(left)

    def _is_asked_to_end(self) -> bool:
        try:
            return not self._channel.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False

    def _turn(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            if key.fd == self._wakeup:
                os.read(self._wakeup, _CHUNK_BYTES)
            elif key.data is not None and self._pass_on(key.data, key.fd) == 0:
                self._selector.unregister(key.fd)
        self._reap()

    def _pass_on(self, rank: int, pipe: int) -> int | None:
        """Sends a chunk of output. Returns its number of bytes: 0 at the end of the file, None if there is none yet."""
        try:
            data = os.read(pipe, _CHUNK_BYTES)
        except BlockingIOError:
            return None
        if data:
            self._send("output", rank, data.decode("latin-1"))
        return len(data)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                # A process whose parent has ended becomes a child of process 1, and is none of the workers.
                if ended[0] in self._running:
                    self._on_exit(*self._running.pop(ended[0]), os.waitstatus_to_exitcode(ended[1]))

    def _on_exit(self, rank: int, pipe: int, status: int) -> None:
        if status and self._failure is None and not self._is_ending:
            self._failure = rank, status
        # All that the worker wrote is in the pipe by now. A child of its own may hold the pipe open and go on writing,
        # so there may be no end to wait for: what the pipe can hold is enough.
        left = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
        while left > 0 and (num_bytes := self._pass_on(rank, pipe)):
            left -= num_bytes
        self._send("closed", rank)
        with contextlib.suppress(KeyError):
            self._selector.unregister(pipe)
        os.close(pipe)

    def _send(self, *event: Any) -> None:
        self._channel.sendall(json.dumps(event).encode() + b"\n")


def main() -> None:
    """Runs the job that comes in at standard input."""
    channel = socket.socket(fileno=os.dup(0))
    # The launcher has gone if the line has no end, or if a send fails.
    with contextlib.suppress(ConnectionError):
        if (line := channel.makefile("rb").readline()).endswith(b"\n"):
            Supervisor(channel).run(json.loads(line))


if __name__ == "__main__":
    main()
