"""What the demo is there to show, with settings that are long enough to show it."""

import statistics

import jax
import pytest

from jax_skipreduce.programs.common import data
from jax_skipreduce.programs.demo import _settings, _training

pytestmark = [pytest.mark.promotes, pytest.mark.slow]


def final_accuracies(seeds, **changes):
    """Of both methods, one per seed."""
    values = {
        "skip_ratio": 0.5,
        "mode": _settings.Mode.RANDOM,
        "normalize": _settings.Normalize.SKIP,
        "num_workers": 8,
        "num_steps": 400,
        "batch_size": 16,
        "optimizer": _settings.Optimizer.ADAM,
        "learning_rate": 2e-3,
        "partition": data.Partition.IID,
        "data": data.DataName.DIGITS,
        "seeds": tuple(seeds),
    }
    chosen = _settings.Settings(**{**values, **changes})
    trainer = _training.Trainer(chosen, data.load(chosen.data), jax.devices("cpu")[:8])

    def train(reduction, seed):
        return trainer.run(reduction, seed, lambda step, loss, accuracy: None).final_accuracy

    full = [train(_training.full_reduction(), seed) for seed in seeds]
    return full, [train(_training.skipping(chosen, seed).transform(), seed) for seed in seeds]


def test_half_skipped_is_within_a_point_of_full_reduction():
    full, skipping = final_accuracies([100, 101, 102])
    assert statistics.fmean(full) > 0.97
    assert statistics.fmean(skipping) > statistics.fmean(full) - 0.01


def test_what_stays_in_place_costs_accuracy_where_workers_see_few_classes():
    changes = {"partition": data.Partition.BY_CLASS, "optimizer": _settings.Optimizer.SGD, "learning_rate": 0.05}
    full, moving = final_accuracies([100], **changes)
    _, static = final_accuracies([100], **changes, mode=_settings.Mode.STATIC)
    assert moving[0] > full[0] - 0.03
    assert static[0] < moving[0] - 0.05
