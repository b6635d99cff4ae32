"""time_limit(): ends a process whose step does not end, because it waits for a worker that never reaches a collective.

XLA and JAX do not end such a process themselves. A thread of its own sends the heartbeats of `jax.distributed`, so the
heartbeats notice a worker that is dead, stopped or cut off, and not one that lives but hangs: in its data loader, a
debugger, or a collective that other workers do not run. XLA limits such waits for some backends and phases alone (Gloo:
30 minutes, ``--xla_cpu_collective_timeout_seconds``; NCCL: none by default). A collective that waits cannot be
interrupted from Python: signal handlers run between bytecodes, and there are none until XLA returns.

So a thread watches, and ends the process by `os._exit`: `sys.exit` in a thread ends that thread, and a regular exit
would wait for the other workers again, in the shutdown barrier of `jax.distributed`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator

# The time for the report. Its reader may have stopped reading, and the process has to end all the same.
_REPORT_S = 5.0
# Wait between the report and the end, so that a hung worker can print its stacks before its peers abort it. All workers
# have the same limit, and reach it at about the same time; JAX aborts the others when one worker ends.
_OTHERS_S = 2.0


class _Watch:
    """The limits in force, and the thread that watches them. One per process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limits: dict[object, tuple[float, float, str, int]] = {}  # deadline, seconds, what, exit code
        self._thread: threading.Thread | None = None
        # The thread sleeps until this time. A limit that ends later need not wake the thread in every step.
        self._wakes_at = math.inf

    def add(self, seconds: float, what: str, exit_code: int) -> object:
        deadline, key = time.monotonic() + seconds, object()
        with self._changed:
            self._limits[key] = (deadline, seconds, what, exit_code)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="skipreduce time_limit", daemon=True)
                self._thread.start()
            elif deadline < self._wakes_at:
                self._changed.notify()
        return key

    def remove(self, key: object) -> None:
        with self._changed:
            # A child that was forked inside of a limit does not have the key.
            self._limits.pop(key, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                first = min(self._limits.values(), default=(math.inf, 0.0, "", 0))
                if first[0] <= now:
                    # The lock is held, so that a step that ends just now waits, and does not go on.
                    _end(*first[1:])
                self._wakes_at = first[0]
                self._changed.wait(None if first[0] == math.inf else min(first[0] - now, threading.TIMEOUT_MAX))


def _end(seconds: float, what: str, exit_code: int) -> None:
    # A thread of its own writes, for a limited time: stderr may be a full pipe, or locked by the thread that hangs.
    reporter = threading.Thread(target=_report, args=(seconds, what), daemon=True)
    reporter.start()
    reporter.join(_REPORT_S)
    time.sleep(_OTHERS_S)
    os._exit(exit_code)


def _report(seconds: float, what: str) -> None:
    text = (
        f"jax_skipreduce: {what} was not done after {seconds:g} s, and the process ends ({os.getpid()} on "
        f"{socket.gethostname()}). It may be waiting for another worker: look for the one whose main thread is "
        "somewhere else than in the training step, or that says nothing (docs/failures.md).\n"
    )
    # Not sys.stderr: the main thread may hold its lock.
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
        faulthandler.dump_traceback(file=2, all_threads=True)
    with contextlib.suppress(Exception):
        sys.stdout.flush()


_watch = _Watch()


def _forget() -> None:
    """Starts anew in a child after a fork, which lacks its parent's thread and may find the lock held for ever."""
    global _watch
    _watch = _Watch()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextlib.contextmanager
def time_limit(seconds: float, what: str, *, exit_code: int = 124) -> Iterator[None]:
    """Ends the process if the block takes longer: a training step, the next batch, a checkpoint.

    In a run of several processes, a worker that hangs makes all other workers wait, for ever on some backends. With the
    limit in all processes, each process ends by itself. It says what it was doing and where all its threads are, and a
    launcher (Slurm, Kubernetes, examples/elastic.py) sees an exit code. See docs/failures.md for what notices which
    failure.

    Put whatever waits into the block: ``jax.block_until_ready`` on what the step returns, or a loss that is printed.
    JAX dispatches a step and returns, so without it the wait would be elsewhere. Compilation counts, too: give the
    first step more. If one worker does more than the others (it writes a checkpoint, evaluates), they wait for it in
    their next step.

    The limit costs some microseconds, communicates nothing, and works with any backend. Blocks may be nested and in
    several threads; the first limit that is over counts. Time in which the process was stopped (SIGSTOP) counts.

    Args:
      seconds: more than the block ever takes, a positive number. `math.inf` sets no limit.
      what: a text for the message that names worker and step, as ``f"worker {jax.process_index()}, step {step}"``.
      exit_code: the exit code of the process, 1..255. The default is the exit code of timeout(1).

    Raises:
      ValueError, TypeError: an argument is out of range. What the block raises passes through.

    Nothing is raised when the time is over. A message and the stacks of all threads go to file descriptor 2, and 2
    seconds later (7 if nobody reads them) the process ends, without `finally` blocks and exit handlers. Only native
    code that holds Python's lock for ever would keep the thread that watches from running; XLA waits without it.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> train_step = jax.jit(lambda x: 2 * x)
      >>> x = jnp.ones(())
      >>> for step in range(3):
      ...     with time_limit(600 if step == 0 else 60, f"worker {jax.process_index()}, step {step}"):
      ...         x = jax.block_until_ready(train_step(x))
      >>> float(x)
      8.0
    """
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"seconds={seconds!r} ({type(seconds).__name__}): expected a number of seconds")
    if not seconds > 0:  # nor NaN
        raise ValueError(f"seconds={seconds}: expected a positive number of seconds, or math.inf for no limit")
    if not isinstance(what, str):
        raise TypeError(f"what={what!r} ({type(what).__name__}): expected a text, such as 'worker 1, step 30'")
    if isinstance(exit_code, bool) or not isinstance(exit_code, int):
        raise TypeError(f"exit_code={exit_code!r} ({type(exit_code).__name__}): expected an int")
    if not 1 <= exit_code <= 255:
        raise ValueError(f"exit_code={exit_code}: expected 1 to 255; 0 would look like success")
    key = _watch.add(seconds, what, exit_code)
    try:
        yield
    finally:
        # The global is read again here: a child that was forked inside of a limit has a watch of its own.
        _watch.remove(key)
