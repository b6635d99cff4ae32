"""`netlab.run`: checks its arguments, plans a lab, runs it and reports how it ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jax_skipreduce.programs.netlab._launch import Lab, LabError
from jax_skipreduce.programs.netlab._output import Output, say, write
from jax_skipreduce.programs.netlab._plan import Plan, choose_congestion_control, make_plan
from jax_skipreduce.programs.netlab._probe import unavailable
from jax_skipreduce.programs.netlab._script import inside, script, setup
from jax_skipreduce.programs.netlab._signals import SignalError, held_back
from jax_skipreduce.programs.netlab._worker import environment

_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_TIMED_OUT = 124  # as from timeout(1)


def run(
    command: Sequence[str],
    *,
    num_workers: int,
    rate: str | Sequence[str],
    queue: str = "100ms",
    env: Mapping[str, str] | None = None,
    output: str = "first",
    timeout_s: float | None = None,
    grace_s: float = 2.0,
) -> int:
    """Runs a command as N workers, each in its own network namespace, over limited links.

    `skipreduce lab` does the same. It needs Linux and root (see `unavailable`). The workers reach each other and
    nothing else. When one worker fails, the others are ended. Nothing of the lab outlives this call, nor this process
    if it is killed. Ctrl-C, SIGTERM and SIGHUP end the lab, and have their usual effect after that.

    Args:
      command: program and arguments, the same for all workers, run in the current folder.
      num_workers: N.
      rate: rate of each link, in each direction, as tc writes it: "500mbit". N rates for unequal links.
      queue: how long packets may queue in front of a link before they are dropped. A short queue costs throughput.
      env: environment variables for the workers, beside those of this process.
      output: whose lines go to stdout as they come: those of "all" workers, of the "first", or of none ("failed"). The
        last lines of a worker that fails go to stderr, unless they were shown.
      timeout_s: seconds after which the workers are ended.
      grace_s: seconds between asking workers to end (SIGTERM) and killing them.

    Returns:
      0 if all workers returned 0; else the status of the first that did not, or 128 + n if signal n ended it; 124 if
      the time was over.

    Raises:
      ValueError: an argument makes no sense.
      LabError: no lab can be made here, a command of the set-up failed, or the lab was killed from outside. A subclass
        of RuntimeError.

    >>> if unavailable() is None:  # Two workers look each other up, where a lab can be made.
    ...     status = run(["getent", "hosts", "w0", "w1"], num_workers=2, rate="500mbit", output="failed")
    ...     assert status == 0
    >>> run(["python", "train.py"], num_workers=2, rate="500mbps")  # Refused everywhere.
    Traceback (most recent call last):
      ...
    ValueError: rate='500mbps': tc reads mbps as bytes per second; write 500mbit for bits
    """
    # Arguments are checked first, so that they can be mended where there is no root.
    plan = _plan(command, num_workers, rate, queue)
    if output not in list(Output):
        raise ValueError(f"output={output!r}: expected one of {', '.join(Output)}")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: expected a number of seconds")
    if not grace_s >= 0:
        raise ValueError(f"grace_s={grace_s}: expected a number of seconds, 0 or more")
    if (reason := unavailable()) is not None:
        raise LabError(reason)
    extra = dict(env or {})
    if shutil.which(command[0], path=extra.get("PATH")) is None:
        raise ValueError(f"command={command[0]!r}: no such program in PATH")
    job = {
        "setup": list(setup(plan)),
        "workers": [
            (inside(worker, command), environment(plan, worker.rank, os.environ, extra)) for worker in plan.workers
        ],
        "timeout_s": timeout_s,
        "grace_s": grace_s,
    }
    with held_back() as signals:
        lab = Lab(num_workers, Output(output), signals)
        try:
            lab.run(job)
        except SignalError as interrupted:
            # For a program whose own handler goes on after this signal; else it is never returned.
            return 128 + interrupted.signum
        finally:
            lab.show_held()
    if lab.failure is not None:
        return _report(lab, *lab.failure)
    if not lab.is_in_time:
        say(f"not done after {timeout_s:g} seconds: all workers were ended")
        return _TIMED_OUT
    return 0


def dry_run(command: Sequence[str], num_workers: int, rate: str | Sequence[str], queue: str) -> Iterator[str]:
    """The lines of a shell script that does the same, but for ending all workers when one fails."""
    plan = _plan(command, num_workers, rate, queue)
    return script(plan, command, [environment(plan, worker.rank, {}, {}) for worker in plan.workers])


def _plan(command: Sequence[str], num_workers: int, rate: str | Sequence[str], queue: str) -> Plan:
    if isinstance(command, str) or not command:
        raise ValueError(f"command={command!r}: expected the program and its arguments, as in ['python', 'train.py']")
    allowed = _ALLOWED.read_text() if _ALLOWED.exists() else ""
    return make_plan(
        num_workers,
        rate,
        queue,
        host_name=socket.gethostname(),
        congestion_control=choose_congestion_control(allowed),
    )


def _report(lab: Lab, rank: int, status: int) -> int:
    """Says which worker failed, and how; returns its status the way a shell does."""
    how = f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
    lines = lab.unseen_lines(rank)
    say(f"worker {rank} {how}; the others were ended" + (". Its last lines:" if lines else ""))
    write(sys.stderr, lines)
    return status if status > 0 else 128 - status
