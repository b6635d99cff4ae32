"""The command `skipreduce bench`: its options, their checks, and the order of things."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from jax_skipreduce._transform.registry import METHODS
from jax_skipreduce.programs.bench._settings import (
    Algorithm,
    DType,
    Mode,
    Settings,
    default_skips,
    parse_choices,
    parse_names,
    parse_sizes,
    parse_skips,
)
from jax_skipreduce.programs.common.cli import OUTPUT_FILE, check_png, refuse
from jax_skipreduce.programs.common.records import write_json

Value = TypeVar("Value")


def bench(
    workers: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="In one process: how many of its accelerators to use, or CPU devices to simulate. Several processes "
            "use all their devices.",
            show_default="all accelerators if there are two or more, else 8",
        ),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Bytes of the message of each worker, with K, M or G for powers of 1024.")
    ] = "1M,4M,16M",
    skip: Annotated[
        str | None,
        typer.Option(
            help="Reduce-scatter steps left out, of 0..N-1 with N workers; all for each of them.",
            show_default="0, N/4, N/2, 3N/4",
        ),
    ] = None,
    algo: Annotated[
        str,
        typer.Option(
            help="What skips: ring, of lax.ppermute; native, one call into the native kernels. Or a method of the "
            "library by its name, such as skipreduce, with its defaults: one row."
        ),
    ] = "ring",
    modes: Annotated[
        str, typer.Option(help="static skips the same slices in every call, random others.")
    ] = "static,random",
    dtype: Annotated[DType, typer.Option(help="Of the message.")] = DType.FLOAT32,
    wire: Annotated[
        str | None,
        typer.Option(
            help="What travels: float32, bfloat16. With bfloat16, psum between two casts is compared, too.",
            show_default="both; bfloat16 with --dtype bfloat16",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="In each, every candidate is timed once, in a new order.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, help="Rounds without a clock before.")] = 2,
    check: Annotated[
        bool, typer.Option(help="Compare results with what they have to be, before they are timed.")
    ] = True,
    seed: Annotated[int, typer.Option(min=0, max=10**9, help="Of the order, the shifts and the messages.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write all numbers, machine and versions there.", **OUTPUT_FILE)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="With --json: the time of every call, too.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Write speed-up against skip ratio there, as PNG.", **OUTPUT_FILE)
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            help="With several processes: host:port where process 0 listens, or auto under SLURM, Open MPI or on a "
            "TPU pod. Start the same command in each. Not needed in skipreduce lab."
        ),
    ] = None,
    num_processes: Annotated[int | None, typer.Option(min=1, help="With --coordinator host:port.")] = None,
    process_id: Annotated[int | None, typer.Option(min=0, help="With --coordinator host:port; 0 prints.")] = None,
) -> None:
    """Time all-reduces with and without skipping, and check them, in the manner of nccl-tests.

    Candidates are lax.psum and the ring (or the native kernels) with each number of skipped steps, at a
    fixed and at a random shift, with float32 and with bfloat16 on the wire. All run in turns, so that
    speed-ups over psum are those of one run. In skipreduce lab the workers are processes behind links of
    limited rate. Exits with 1 if an element is wrong. docs/bench.md says how each number comes about.
    """
    chosen_sizes = _parse("--sizes", parse_sizes, sizes, dtype)
    algorithms = _parse("--algo", parse_names, algo, (*(algorithm.value for algorithm in Algorithm), *METHODS))
    chosen_modes = _parse("--modes", parse_choices, modes, Mode)
    all_wires = "bfloat16" if dtype == DType.BFLOAT16 else "float32,bfloat16"
    wires = _parse("--wire", parse_choices, all_wires if wire is None else wire, DType)
    if dtype == DType.BFLOAT16 and DType.FLOAT32 in wires:
        refuse("a message in bfloat16 does not travel in float32", "--wire")
    if raw and json_path is None:
        refuse("the times of single calls go into the file that --json names", "--raw")
    check_png(plot, "--plot")
    if coordinator is None and (num_processes, process_id) != (None, None):
        refuse("needed for several processes: host:port of process 0, the same for all", "--coordinator")
    if coordinator not in (None, "auto") and None in (num_processes, process_id):
        refuse("host:port needs --num-processes and --process-id", "--coordinator")

    # Not at the top: help should not wait for JAX, nor need what it does not use.
    from jax_skipreduce import native_info
    from jax_skipreduce.programs.bench import (
        _candidates,
        _figure,
        _measure,
        _progress,
        _report,
        _rows,
        _table,
        _workers,
    )

    try:
        _workers.join(coordinator, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        refuse(str(error), None if coordinator is None else "--coordinator")
    try:
        devices = _workers.find(workers)
    except RuntimeError as error:
        _refuse_together(str(error), "--workers")
    num_workers = len(devices)
    if Algorithm.NATIVE in algorithms and devices[0].platform == "cpu" and (reason := native_info().cpu) is not None:
        _refuse_together(f"no native kernels: {reason}", "--algo")
    try:
        skips = default_skips(num_workers) if skip is None else parse_skips(skip, num_workers)
    except ValueError as error:
        _refuse_together(str(error), "--skip")
    settings = Settings(chosen_sizes, skips, chosen_modes, wires, dtype, rounds, warmup, check, seed, algorithms)
    candidates = _candidates.make_candidates(settings)
    try:
        runner = _measure.Bench(settings, candidates, devices)
    except ValueError as error:
        _refuse_together(f"{error}. --no-check goes without", "--check")

    machine = _report.machine(devices)
    _echo(*_table.preamble(settings, machine, len(candidates)), *_table.heading())
    rows: list[_rows.Row] = []
    for number, size_bytes in enumerate(chosen_sizes):
        title = f"size {number + 1} of {len(chosen_sizes)}"
        with _progress.shown(title, _is_first()) as on_progress:
            measurements = runner.measure(size_bytes, on_progress)
        of_size = _rows.make_rows(size_bytes, dtype, num_workers, measurements)
        _echo(*map(_table.line, of_size))
        rows += of_size
    _echo(*_table.closing(rows))
    if _is_first() and json_path is not None:
        write_json(json_path, _report.as_json(settings, machine, rows, raw))
        _echo(f"# Numbers: {json_path}")
    if _is_first() and plot is not None:
        title = f"all-reduce of {num_workers} workers, {dtype.value}, {machine['platform']}"
        _figure.save_figure(rows, num_workers, title, plot)
        _echo(f"# Figure: {plot}")
    if any(row.num_wrong for row in rows):
        raise typer.Exit(1)


def _is_first() -> bool:
    """Whether this process is the one that prints and writes."""
    import jax

    return jax.process_index() == 0


def _echo(*lines: str) -> None:
    if _is_first():
        for line in lines:
            typer.echo(line)


def _parse(option: str, parse: Callable[..., Value], *arguments: Any) -> Value:
    try:
        return parse(*arguments)
    except ValueError as error:
        refuse(str(error), option)


def _refuse_together(message: str, option: str) -> NoReturn:
    """The same where all processes come to the same end: one of them says why."""
    if _is_first():
        refuse(message, option)
    raise typer.Exit(2)
