"""Examples run as users run them: found by path, with JAX's standard dtype promotion."""

import importlib
from pathlib import Path

import jax
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(autouse=True)
def _as_users_run_them():
    # Starts the backend with the devices that all tests share, before an example asks for as many as it wants.
    jax.devices()
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def load_example(monkeypatch):
    """A function name -> the module ``examples/NAME.py``."""

    def load(name: str):
        monkeypatch.syspath_prepend(FOLDER)
        return importlib.import_module(name)

    return load


@pytest.fixture
def example_path():
    """A function name -> the path of ``examples/NAME.py``."""
    return lambda name: FOLDER / f"{name}.py"
