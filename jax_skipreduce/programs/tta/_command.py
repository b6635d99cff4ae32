"""The command `skipreduce tta`: its options, their checks, and the order of things."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from jax_skipreduce.programs.common.cli import OUTPUT_FILE, refuse
from jax_skipreduce.programs.common.data import DataName
from jax_skipreduce.programs.common.records import write_json
from jax_skipreduce.programs.tta._settings import DEFAULTS, MAX_STEPS, QUICK_TARGETS, Settings, Size, WorkloadName

_TARGETS = ", ".join(f"{defaults.target:g} for {name}" for name, defaults in DEFAULTS.items())


def _check_target(value: float | None) -> float | None:
    if value is not None and not 0 < value < 1:
        raise typer.BadParameter(f"{value} is no accuracy in (0, 1), such as 0.8")
    return value


def tta(
    workload: Annotated[
        str,
        typer.Option(
            help="vgg: a CNN with large dense layers, on Fashion-MNIST. lm: a small byte-level LLaMA, on the novels of "
            "Jane Austen. all: one after the other."
        ),
    ] = "all",
    workers: Annotated[
        int | None,
        typer.Option(min=2, max=64, help="Data-parallel workers.", show_default="8, with --quick 4, in a lab its own"),
    ] = None,
    rate: Annotated[
        list[str] | None,
        typer.Option(
            help="Of each worker's link, as for skipreduce lab: 200mbit, or one per worker with commas between. Once "
            "for each lab to measure in.",
            show_default=", ".join(f"{defaults.rate} for {name}" for name, defaults in DEFAULTS.items()),
        ),
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(help="Names with commas between; a wrong one shows all.", show_default="all but skip-0*, skip-25"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=10**6, help="Of shards, parameters, order and shifts.")] = 0,
    seeds: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="So many seeds, from --seed on.", show_default="3, with --quick 1"),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_STEPS, help="Training steps of each run.", show_default="200, with --quick 40"),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Images, or windows of text, per worker and step.",
            show_default=", ".join(f"{defaults.batch_size} for {name}" for name, defaults in DEFAULTS.items()),
        ),
    ] = None,
    interval: Annotated[
        int | None,
        typer.Option(min=1, help="Steps between two evaluations.", show_default="10, with --quick 5"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(help="Test accuracy to reach.", callback=_check_target, show_default=_TARGETS),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            min=0, help="How often each step is timed for the break-down; 0: none.", show_default="15, with --quick 5"
        ),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="A few minutes: vgg unless --workload says otherwise, small network, three methods, one seed. A test "
            "of the set-up, no result.",
        ),
    ] = False,
    data: Annotated[
        DataName, typer.Option(help="Images of vgg. digits come with scikit-learn: for a try.")
    ] = DataName.FASHION_MNIST,
    data_dir: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of Fashion-MNIST (Debian: dataset-fashion-mnist)."),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="Text of lm instead of the novels, UTF-8.")
    ] = None,
    text_dir: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of the novels, the data of r-cran-janeaustenr."),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", help="Write there: settings, machine, versions, curves, figures.", **OUTPUT_FILE),
    ] = None,
    plot_dir: Annotated[
        Path,
        typer.Option(file_okay=False, help="Folder for pictures, and for results as they come in (*.jsonl)."),
    ] = Path("skipreduce-tta"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Keep the runs that are in --plot-dir, make those that are missing.")
    ] = False,
    no_lab: Annotated[
        bool, typer.Option("--no-lab", help="Workers as devices of this process, no links: times say little.")
    ] = False,
) -> None:
    """Time to a target accuracy over slow links: training with lax.pmean, with skipping, and with other methods.

    Makes a lab for each workload and rate (root needed), in which the workers make all runs, one at a time. Inside
    of a lab that is there already, it is one of its workers.
    """
    from jax_skipreduce.programs.tta import _methods

    workloads = _workloads(workload, quick)
    if target is not None and len(workloads) > 1:
        refuse(f"{target}: accuracies of images and of text have little in common; give one --workload", "--target")
    if text is not None and text_dir is not None:
        refuse("give either a file, or the folder of the novels", "--text")
    default_methods = _methods.QUICK_METHODS if quick else _methods.DEFAULT_METHODS
    names = tuple(dict.fromkeys(name.strip() for name in methods.split(","))) if methods else default_methods
    for name in names:
        try:
            _methods.find(name)
        except ValueError as error:
            refuse(str(error), "--methods")

    from jax_skipreduce import netlab

    in_lab = netlab.is_worker()
    _check_lab(in_lab, no_lab, rate, workers)
    num_workers = workers or (4 if quick else 8)
    all_settings = []
    for name in workloads:
        defaults = DEFAULTS[name]
        for one in [None] if no_lab else dict.fromkeys(rate or [defaults.rate]):
            chosen = target if target is not None else QUICK_TARGETS[name] if quick else defaults.target
            settings = Settings(
                workload=name.value,
                num_workers=num_workers,
                rate=one,
                methods=names,
                seeds=tuple(range(seed, seed + (seeds or (1 if quick else 3)))),
                num_steps=steps or (40 if quick else 200),
                evaluation_interval=interval or (5 if quick else 10),
                target=chosen,
                batch_size=batch_size or defaults.batch_size,
                learning_rate=defaults.learning_rate,
                num_test=defaults.num_test,
                size=Size.SMALL.value if quick else Size.FULL.value,
                num_rounds=(5 if quick else 15) if rounds is None else rounds,
                data=data.value,
                data_dir=None if data_dir is None else str(data_dir.absolute()),
                text=None if text is None else str(text.absolute()),
                text_dir=None if text_dir is None else str(text_dir.absolute()),
                lines="",
                resume=resume,
            )
            path = plot_dir.absolute() / f"{settings.name}.jsonl"
            all_settings.append(dataclasses.replace(settings, lines=str(path)))
    if in_lab:
        (settings,) = all_settings if len(all_settings) == 1 else _refuse_several()
        all_settings = [_as_worker(settings)]
    elif not no_lab:
        _check_rates(all_settings)
    _check_data(all_settings)
    _check_resume(all_settings)
    _measure(all_settings, json_path, plot_dir, in_lab)


def _measure(all_settings: list[Settings], json_path: Path | None, plot_dir: Path, in_lab: bool) -> None:
    from rich.console import Console

    from jax_skipreduce.programs.tta import _driver, _figures, _report, _results

    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(line, soft_wrap=True, markup=False)

    reports: list[dict[str, Any]] = []
    for settings in all_settings:
        try:
            measurement = (_driver.measure_as_worker if in_lab else _driver.measure)(settings, say)
        except _driver.StoppedError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(1) from None
        if measurement is None:
            return
        results = _results.evaluate(measurement, settings.target, settings.methods)
        console.print(_report.table(results))
        if results.parts:
            console.print(_report.breakdown_table(results))
        for line in _report.remarks(results):
            say(line)
        for path in _figures.save_figures(results, plot_dir):
            say(f"Figure: {path}")
        reports.append(_results.as_json(results))
        if json_path is not None:
            # After each, so that an hour of measurements does not wait for the next one.
            write_json(json_path, {"measurements": reports})
    if json_path is not None:
        say(f"Results: {json_path}")


def _workloads(workload: str, quick: bool) -> list[WorkloadName]:
    if workload == "all":
        return [WorkloadName.VGG] if quick else list(WorkloadName)
    try:
        return [WorkloadName(workload)]
    except ValueError:
        refuse(f"{workload!r}; expected {', '.join(WorkloadName)} or all", "--workload")


def _check_lab(in_lab: bool, no_lab: bool, rate: list[str] | None, workers: int | None) -> None:
    from jax_skipreduce import netlab

    if no_lab:
        if in_lab:
            refuse("this is a worker of a lab", "--no-lab")
        if rate:
            refuse("there are no links without a lab; leave out one of --rate and --no-lab", "--rate")
    elif in_lab:
        if workers is not None:
            refuse("the lab has its own number of workers", "--workers")
        if len(rate or []) != 1:
            refuse("inside of a lab, give once the rate of its links, to have it in the results", "--rate")
    else:
        reason = netlab.unavailable()
        if reason is not None:
            refuse(f"{reason} With --no-lab the workers are devices of this process, and times say little", "--rate")


def _check_rates(all_settings: list[Settings]) -> None:
    """All of them now: the second lab is made an hour after the first."""
    from jax_skipreduce import netlab

    for settings in all_settings:
        assert settings.rate is not None
        try:
            list(netlab.dry_run(["true"], settings.num_workers, settings.rate, "100ms"))
        except ValueError as error:
            refuse(str(error), "--rate")


def _as_worker(settings: Settings) -> Settings:
    """With the number of workers of the lab that this process belongs to."""
    import os

    from jax_skipreduce import netlab

    return dataclasses.replace(settings, num_workers=netlab.read_environment(os.environ)[1])


def _refuse_several() -> NoReturn:
    refuse("inside of a lab, one at a time: give vgg or lm", "--workload")


def _check_data(all_settings: list[Settings]) -> None:
    """Before a lab is made: what is missing should be said once, and at once."""
    from jax_skipreduce.programs.tta._workloads import deal_batches, load_examples

    for settings in {settings.workload: settings for settings in all_settings}.values():
        is_images = settings.workload == WorkloadName.VGG
        try:
            examples = load_examples(settings)
        except (OSError, ValueError) as error:
            refuse(str(error), "--data" if is_images else "--text" if settings.text else "--text-dir")
        try:
            deal_batches(examples, settings, settings.seeds[0], rank=0)
        except ValueError as error:
            refuse(str(error), "--batch-size")


def _check_resume(all_settings: list[Settings]) -> None:
    from jax_skipreduce.programs.tta._records import check_resumable

    for settings in all_settings:
        if settings.resume and settings.path.exists():
            try:
                check_resumable(settings.path, settings)
            except ValueError as error:
                refuse(str(error), "--resume")
