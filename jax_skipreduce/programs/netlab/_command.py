"""The command `skipreduce lab`."""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated

import typer

from jax_skipreduce.programs.netlab._launch import LabError
from jax_skipreduce.programs.netlab._output import Output, say
from jax_skipreduce.programs.netlab._run import dry_run, run


def lab(
    command: Annotated[list[str], typer.Argument(help="Program and arguments, after --.", show_default=False)],
    workers: Annotated[int, typer.Option(help="N: how many workers.", show_default=False)],
    rate: Annotated[
        str,
        typer.Option(
            help="Rate of each link, in each direction, as tc writes it: 500mbit, 1gbit. For unequal links, N rates "
            "separated by commas.",
            show_default=False,
        ),
    ],
    delay_queue: Annotated[
        str, typer.Option(help="How long packets may queue in front of a link before they are dropped.")
    ] = "100ms",
    output: Annotated[
        Output,
        typer.Option(
            help="Whose output is shown: that of all workers, of the first one, or of none. The last lines of a worker "
            "that fails are shown in any case."
        ),
    ] = Output.FIRST,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds after which the workers are ended.", show_default=False)
    ] = None,
    is_dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print a shell script that does the same, and run nothing.")
    ] = False,
) -> None:
    """Run a command as N workers, each in its own network namespace, over limited links.

    skipreduce lab --workers 8 --rate 500mbit -- python train.py

    In train.py, jax_skipreduce.netlab.initialize() makes the workers N processes of jax.distributed. The workers reach
    each other and nothing else. When one fails, all are ended, and its status is returned. Needs Linux and root.
    """
    try:
        if is_dry_run:
            for line in dry_run(command, workers, rate, delay_queue):
                typer.echo(line)
            return
        status = run(command, num_workers=workers, rate=rate, queue=delay_queue, output=output.value, timeout_s=timeout)
    except ValueError as error:
        raise typer.BadParameter(_in_words_of_the_command(str(error))) from None
    except LabError as error:
        say(str(error).removeprefix("skipreduce lab "))
        raise typer.Exit(1) from None
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain at exit that it cannot flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt:
        raise typer.Exit(128 + signal.SIGINT) from None
    raise typer.Exit(status)


def _in_words_of_the_command(message: str) -> str:
    """Names the option where `run` names its argument."""
    for argument, option in (
        ("num_workers=", "--workers "),
        ("rate=", "--rate "),
        ("queue=", "--delay-queue "),
        ("timeout_s=", "--timeout "),
        ("command=", "command "),
    ):
        if message.startswith(argument):
            return option + message.removeprefix(argument)
    return message
