"""The README's code runs, and its table is what it prints."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)


def python_block(word):
    (block,) = [text for language, text in BLOCKS if language == "python" and word in text]
    return block


@pytest.mark.promotes
def test_the_training_steps_train():
    names = {}
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(64, 32)).astype(np.float32)
    x = rng.normal(size=(128, 64)).astype(np.float32)
    for word, leading in (("jax.shard_map", (128,)), ("spmd_axis_name", (8, 16))):
        exec(python_block(word), names)  # the second one builds on the first
        batch = {"x": jnp.asarray(x.reshape(*leading, 64)), "y": jnp.asarray((x @ weights).reshape(*leading, 32))}
        params = {"w": jnp.zeros((64, 32))}
        state, losses = names["tx"].init(params), []
        for _ in range(100):
            params, state, *_ = names["train_step"](params, state, batch)
            losses.append(float(names["loss_fn"](params, batch)))
        assert losses[-1] < 0.95 * losses[0]
        assert int(state[0].num_reductions) == 100


def test_the_table_is_what_describe_prints(capsys):
    block = python_block("sr.describe(params")
    exec("import jax.numpy as jnp\nimport jax_skipreduce as sr\n" + block)
    printed = capsys.readouterr().out
    (table,) = [text for language, text in BLOCKS if language == "text" and text.startswith("gradient")]
    assert printed == table


def test_the_one_line_change_is_in_the_first_screen():
    assert README.index('sr.skipreduce("data", skip_ratio=0.5)') < README.index(".venv/bin/skipreduce demo") < 2000
    assert jax.device_count() == 8
