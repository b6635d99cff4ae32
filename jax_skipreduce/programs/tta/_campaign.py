"""All runs of a measurement, in one of the processes that make them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jax_skipreduce.programs.tta import _breakdown, _records, _workloads
from jax_skipreduce.programs.tta._cluster import Cluster
from jax_skipreduce.programs.tta._records import Run
from jax_skipreduce.programs.tta._settings import Settings
from jax_skipreduce.programs.tta._training import Trainer


def order_of(methods: Sequence[str], seed: int) -> list[str]:
    """The methods in the order of their runs, drawn anew for each seed: none always comes first."""
    order: list[int] = np.random.default_rng((seed, 2)).permutation(len(methods)).tolist()
    return [methods[i] for i in order]


def run_all(settings: Settings, cluster: Cluster, say: Callable[[str], None]) -> None:
    """Makes the runs that are not there yet, one at a time, seed by seed, and writes each down at once.

    Called in all processes. The one with worker 0 writes, and says how far it is.

    Args:
      settings: of the measurement.
      cluster: the workers.
      say: shows a line.
    """
    start = time.perf_counter()
    workload = _workloads.load(settings)
    trainer = Trainer(settings, workload, cluster)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(workload.init, 0)))
    plan = [
        (seed, position, name)
        for seed in settings.seeds
        for position, name in enumerate(order_of(settings.methods, seed))
    ]
    pending, timings_missing = plan, True
    if cluster.is_first:
        header = _records.make_header(settings, num_parameters)
        done = {(run.seed, run.method) for run in _records.open_file(settings.path, settings, header)}
        pending = [item for item in plan if (item[0], item[2]) not in done]
        timings = _records.read(settings.path).timings
        timings_missing = timings is None or not set(settings.methods) <= set(timings.step)
    # The others may have no such file, and all have to make the same runs.
    answers = cluster.from_first([float(item in pending) for item in plan] + [float(timings_missing)])
    pending = [item for item, answer in zip(plan, answers[:-1], strict=True) if answer]

    if cluster.is_first:
        say(
            f"{settings.name}: {num_parameters:,} parameters, {4 * num_parameters / 2**20:.1f} MiB of gradients, "
            f"{len(pending)} of {len(plan)} runs to make"
        )
    for name in dict.fromkeys(name for _, _, name in pending):
        trainer.warm_up(name)
        if cluster.is_first:
            say(f"compiled {name} ({time.perf_counter() - start:.0f} s)")
    if answers[-1] and settings.num_rounds:
        timings = _breakdown.measure(trainer, settings.methods, settings.num_rounds)
        if cluster.is_first:
            _records.append(settings.path, _records.as_line(timings))
            share = _breakdown.break_down(timings)[settings.methods[0]].share_of_communication
            say(
                f"timed {settings.num_rounds} steps of each for the break-down ({time.perf_counter() - start:.0f} s); "
                f"communication takes {share:.0%} of a step of {settings.methods[0]}"
            )
    for number, (seed, position, name) in enumerate(pending, start=1):
        run = trainer.run(name, seed, position)
        if cluster.is_first:
            _records.append(settings.path, _records.as_line(run))
            say(f"[{number}/{len(pending)}] {_said(run)} ({time.perf_counter() - start:.0f} s)")


def _said(run: Run) -> str:
    return (
        f"seed {run.seed}, {run.method}: accuracy {run.evaluations[-1].accuracy:.1%}, "
        f"step {np.median(run.step_seconds) * 1e3:.0f} ms, {sum(run.step_seconds):.0f} s of training"
    )
