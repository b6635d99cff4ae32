"""Eight CPU devices for every test, the ring where a test says nothing else, and no silent change of a dtype."""

import os
import signal
import threading

import jaxlib.version

# Stock XLA may hang when many executions with collectives are in flight on few cores. Read when the
# backend starts.
os.environ.setdefault("NPROC", "16")
# What "auto" means: the ring is the reference, and what runs everywhere. tests/native compares the kernels with it.
os.environ.setdefault("SKIPREDUCE_BACKEND", "xla")
# Most tests are compilation, which takes a third of the time so. test_optimized.py runs tests of bits as XLA optimizes.
# XLA aborts the process at a flag that it does not know, so these are for versions that were tried.
if jaxlib.version.__version__.startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
# A shell starts what runs in its background with SIGINT ignored. Children would inherit that, and wait for ever where
# a test interrupts them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import jax
import pytest

import jax_skipreduce as sr

jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS", "cpu"))
jax.config.update("jax_num_cpu_devices", 8)


# The first call compiles.
hypothesis.settings.register_profile("compiling", deadline=None)
hypothesis.settings.load_profile("compiling")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    native = [item for item in items if item.get_closest_marker("native")]
    if native and (reason := sr.native_info().cpu) is not None:
        for item in native:
            item.add_marker(pytest.mark.skip(reason=f"no native kernels: {reason}"))


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest):
    """The library's own tests run without implicit dtype promotion; programs and doctests as users run them."""
    if request.node.get_closest_marker("promotes") or "tests" not in request.node.path.parts:
        yield
        return
    with jax.numpy_dtype_promotion("strict"):
        yield
