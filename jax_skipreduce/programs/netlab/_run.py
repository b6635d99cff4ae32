"""Runs a command in a lab, from the first namespace to the last one removed."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jax_skipreduce.programs.netlab._commands import execute, inside, setup, teardown
from jax_skipreduce.programs.netlab._output import Output, say, write
from jax_skipreduce.programs.netlab._owner import owned_lab
from jax_skipreduce.programs.netlab._plan import Plan, choose_congestion_control, make_plan
from jax_skipreduce.programs.netlab._probe import unavailable
from jax_skipreduce.programs.netlab._signals import SignalError, held_back
from jax_skipreduce.programs.netlab._supervise import Supervisor
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

    What `skipreduce lab` does. Needs Linux and root (see `unavailable`). The workers reach each other and nothing else.
    When one fails, the others are ended. Everything that was made is removed in the end, also after Ctrl-C, SIGTERM and
    SIGHUP, which have their usual effect after that.

    Args:
      command: program and arguments, the same for all workers, run in the current folder.
      num_workers: N.
      rate: of each link, in each direction, as tc writes it: "500mbit"; or N of them, for unequal links.
      queue: how long packets may queue in front of a link before they are dropped. A short one costs throughput.
      env: environment variables for the workers, beside those of this process.
      output: whose lines go to stdout as they come: of "all", of the "first" worker, or of none ("failed"). The last
        lines of a worker that fails go to stderr, unless they were shown.
      timeout_s: seconds after which the workers are ended.
      grace_s: seconds between asking workers to end (SIGTERM) and killing them.

    Returns:
      0 if all workers returned 0; else the status of the first that did not, or 128 + n if signal n ended it; 124 if
      the time was over.

    Raises:
      ValueError: an argument makes no sense.
      RuntimeError: no lab can be made here.
      LabError: a RuntimeError too: a command of the set-up failed, or something could not be removed.

    >>> run(["python", "train.py"], num_workers=2, rate="500mbps")
    Traceback (most recent call last):
      ...
    ValueError: rate='500mbps': tc reads mbps as bytes per second; write 500mbit for bits
    """
    check(command, num_workers, rate, queue, output, timeout_s, grace_s)
    if (reason := unavailable()) is not None:
        raise RuntimeError(reason)
    extra = dict(env or {})
    if shutil.which(command[0], path=extra.get("PATH")) is None:
        raise ValueError(f"command={command[0]!r}: no such program in PATH")

    is_in_time = False
    with held_back() as signals:
        supervisor = Supervisor(Output(output), signals)
        try:
            with owned_lab() as lab_id, supervisor.ending(grace_s):
                plan = _plan(lab_id, command, num_workers, rate, queue)
                for step in setup(plan):
                    signals.check()
                    execute(step)
                for worker in plan.workers:
                    signals.check()
                    supervisor.start(worker, command, environment(plan, worker.rank, os.environ, extra))
                is_in_time = supervisor.wait(timeout_s)
            supervisor.show_held()
        except SignalError as interrupted:
            supervisor.show_held()
            # For a program whose own handler goes on after this signal; else it is never returned.
            return 128 + interrupted.signum
    if supervisor.failure is not None:
        return _report(supervisor, *supervisor.failure)
    if not is_in_time:
        say(f"not done after {timeout_s:g} seconds: all workers were ended")
        return _TIMED_OUT
    return 0


def check(
    command: Sequence[str],
    num_workers: int,
    rate: str | Sequence[str],
    queue: str,
    output: str,
    timeout_s: float | None,
    grace_s: float = 0.0,
) -> None:
    """Raises ValueError for arguments of `run` that make no sense anywhere."""
    _plan("check", command, num_workers, rate, queue)
    if output not in list(Output):
        raise ValueError(f"output={output!r}: expected one of {', '.join(Output)}")
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s={timeout_s}: expected a number of seconds")
    if not grace_s >= 0:
        raise ValueError(f"grace_s={grace_s}: expected a number of seconds, 0 or more")


def dry_run(command: Sequence[str], num_workers: int, rate: str | Sequence[str], queue: str) -> Iterator[str]:
    """The lines of a shell script that does the same, but for ending all workers when one fails."""
    plan = _plan("dryrun", command, num_workers, rate, queue)
    yield from map(str, setup(plan))
    for worker in plan.workers:
        env = environment(plan, worker.rank, {}, {})
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        yield f"{variables} {inside(worker.namespace, command)} &"
    yield "wait"
    yield from map(str, teardown(plan.namespaces))


def _plan(lab_id: str, command: Sequence[str], num_workers: int, rate: str | Sequence[str], queue: str) -> Plan:
    if isinstance(command, str) or not command:
        raise ValueError(f"command={command!r}: expected the program and its arguments, as in ['python', 'train.py']")
    allowed = _ALLOWED.read_text() if _ALLOWED.exists() else ""
    return make_plan(
        lab_id,
        num_workers,
        rate,
        queue,
        host_name=socket.gethostname(),
        congestion_control=choose_congestion_control(allowed),
    )


def _report(supervisor: Supervisor, rank: int, status: int) -> int:
    """Says which worker failed, and how; returns its status the way a shell does."""
    how = f"ended with status {status}" if status > 0 else f"was killed by {signal.Signals(-status).name}"
    lines = supervisor.unseen_lines(rank)
    say(f"worker {rank} {how}; the others were ended" + (". Its last lines:" if lines else ""))
    write(sys.stderr, lines)
    return status if status > 0 else 128 - status
