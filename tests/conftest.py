"""Eight CPU devices for every test, and no silent change of a dtype."""

import os

# Stock XLA may hang when many executions with collectives are in flight on few cores. Read when the
# backend starts.
os.environ.setdefault("NPROC", "16")

import hypothesis
import jax
import pytest

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)


# The first call compiles.
hypothesis.settings.register_profile("compiling", deadline=None)
hypothesis.settings.load_profile("compiling")


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest):
    """The library's own tests run without implicit dtype promotion; programs and doctests as users run them."""
    if request.node.get_closest_marker("promotes") or "tests" not in request.node.path.parts:
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield
