"""The command `skipreduce demo`: its options, their checks, and the order of things."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from jax_skipreduce.programs.common.cli import OUTPUT_FILE, check_png, refuse
from jax_skipreduce.programs.common.data import DataName, Partition
from jax_skipreduce.programs.common.records import write_json
from jax_skipreduce.programs.demo._settings import (
    DEFAULT_LEARNING_RATES,
    Mode,
    Normalize,
    Optimizer,
    Settings,
)


def _check_skip_ratio(value: float) -> float:
    if not 0 <= value < 1:
        raise typer.BadParameter(f"{value} is not in [0, 1), the share of its gradients that each worker leaves out")
    return value


def _check_learning_rate(value: float | None) -> float | None:
    if value is not None and not (value > 0 and math.isfinite(value)):
        raise typer.BadParameter(f"{value} is not a positive number")
    return value


def demo(
    skip_ratio: Annotated[
        float, typer.Option(help="Share of its gradients that each worker leaves out.", callback=_check_skip_ratio)
    ] = 0.5,
    mode: Annotated[
        Mode,
        typer.Option(
            help="random: what is skipped moves every step. static: it does not, which costs about 10 points of test "
            "accuracy on digits with --partition by-class. dropout: single elements, saves no bytes."
        ),
    ] = Mode.RANDOM,
    normalize: Annotated[
        Normalize, typer.Option(help="Divide by the number of workers (skip) or of contributors (drop).")
    ] = Normalize.SKIP,
    workers: Annotated[int, typer.Option(min=2, help="Data-parallel workers.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 400,
    seed: Annotated[int, typer.Option(min=0, max=10**9, help="Of shards, parameters, order of images and shifts.")] = 0,
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Repeat with so many seeds, from --seed on, and report means.")
    ] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Images per worker and step.")] = 16,
    optimizer: Annotated[Optimizer, typer.Option(help="sgd has momentum 0.9.")] = Optimizer.ADAM,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="Of the optimizer.",
            callback=_check_learning_rate,
            show_default=", ".join(f"{rate} for {name}" for name, rate in DEFAULT_LEARNING_RATES.items()),
        ),
    ] = None,
    partition: Annotated[
        Partition,
        typer.Option(
            help="How images are dealt to the workers, which keep them: iid at random, by-class sorted by label, so "
            "that each worker sees few classes (try it with --mode static, then random)."
        ),
    ] = Partition.IID,
    data: Annotated[
        DataName,
        typer.Option(
            help="digits: 8x8 pixels, come with scikit-learn. fashion-mnist: 28x28 pixels, from apt-get install "
            "dataset-fashion-mnist or --data-dir."
        ),
    ] = DataName.DIGITS,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            file_okay=False,
            help="Folder with train-images-idx3-ubyte.gz and the other three files of --data fashion-mnist; "
            "unpacked files will do.",
        ),
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write figures, settings, versions and curves there.", **OUTPUT_FILE)
    ] = None,
    plot: Annotated[Path, typer.Option(help="Write the curves there, as PNG.", **OUTPUT_FILE)] = Path(
        "skipreduce-demo.png"
    ),
) -> None:
    """Train a small CNN with full reduction and with skipping, and compare.

    Both runs have the same initial parameters and the same batches; only the reduction of the
    gradients differs. The workers are simulated as CPU devices of this process, unless there are
    two or more accelerators.
    """
    if data_dir is not None and data == DataName.DIGITS:
        refuse("digits come with scikit-learn; a folder is for --data fashion-mnist", "--data-dir")
    check_png(plot, "--plot")

    # Not at the top: help should not wait for JAX, nor need what it does not use.
    from rich.console import Console

    from jax_skipreduce.programs.common import data as datasets
    from jax_skipreduce.programs.common.devices import find_workers
    from jax_skipreduce.programs.demo import _figure, _progress, _report, _training

    try:
        dataset = datasets.load(data, data_dir)
    except (OSError, ValueError) as error:
        refuse(str(error), "--data" if data_dir is None else "--data-dir")
    try:
        devices = find_workers(workers)
    except RuntimeError as error:
        refuse(str(error), "--workers")
    per_worker = len(dataset.train_labels) // len(devices)
    if batch_size > per_worker:
        refuse(f"{batch_size} images, but each of {len(devices)} workers holds only {per_worker}", "--batch-size")
    settings = Settings(
        skip_ratio=skip_ratio,
        mode=mode,
        normalize=normalize,
        num_workers=len(devices),
        num_steps=steps,
        batch_size=batch_size,
        optimizer=optimizer,
        learning_rate=DEFAULT_LEARNING_RATES[optimizer] if learning_rate is None else learning_rate,
        partition=partition,
        data=data,
        seeds=tuple(range(seed, seed + seeds)),
    )
    trainer = _training.Trainer(settings, dataset, devices)
    console = Console(highlight=False)
    for note in _report.notes(settings, trainer.describe(), devices, workers):
        console.print(note)
    comparison = _progress.compare(trainer, settings, console)
    console.print(_report.table(comparison))
    console.print(_report.remark(devices))
    _figure.save_figure(comparison, plot)
    console.print(f"Curves: {plot}", soft_wrap=True)
    if json_path is not None:
        write_json(json_path, _report.as_json(comparison, devices))
        console.print(f"Figures: {json_path}", soft_wrap=True)
