"""Settings that are small enough for a test."""

from jax_skipreduce.programs.tta._settings import Settings


def make_settings(tmp_path, **changes):
    values = {
        "workload": "vgg",
        "num_workers": 4,
        "rate": None,
        "methods": ("psum", "skip-50"),
        "seeds": (0,),
        "num_steps": 6,
        "evaluation_interval": 3,
        "target": 0.3,
        "batch_size": 8,
        "learning_rate": 1e-3,
        "num_test": 30,
        "size": "small",
        "num_rounds": 2,
        "data": "digits",
        "data_dir": None,
        "text": None,
        "text_dir": None,
        "lines": str(tmp_path / "runs.jsonl"),
    }
    return Settings(**values | changes)
