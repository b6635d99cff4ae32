"""What is public stays, and imports run one way."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jax_skipreduce as sr

PACKAGE = Path(sr.__file__).parent

# Each module may import those before it.
LAYERS = (
    "_deadline",
    "_schedule",
    "_ring",
    "_reference",
    "_axes",
    "_shift",
    "_wire",
    "_ffi",
    "_execute",
    "_dispatch",
    "_hierarchy",
    "_selection",
    "_ratio",
    "_collectives",
    "_buckets",
    "_fsdp_ring",
    "_fsdp",
    "_local",
    "_replicas",
    "_reduction",
    "_sharded",
    "_configuration",
    "_transform",
    "_describe",
    "_metrics",
    "_importance",
    "_importance_average",
    "_importance_choice",
    "_importance_tracker",
)


def test_public_names():
    assert sorted(sr.__all__) == [
        "Description",
        "ImportanceState",
        "ImportanceTracker",
        "LeafDescription",
        "LeafImportance",
        "NativeInfo",
        "Protection",
        "SkipReduceState",
        "all_gather",
        "all_reduce",
        "by_path",
        "check_replicas",
        "choose_protected",
        "describe",
        "fsdp_cut",
        "fsdp_gather",
        "fsdp_join",
        "importance",
        "local_params",
        "local_value_and_grad",
        "metrics",
        "native_info",
        "netlab",
        "reduce_scatter",
        "skipreduce",
        "time_limit",
        "track_importance",
    ]
    assert all(hasattr(sr, name) for name in sr.__all__)


def test_signatures():
    assert str(inspect.signature(sr.skipreduce)).startswith(
        "(axis_name: 'AxisName', skip_ratio: 'SkipRatios' = 0.5, *, mode: 'TransformMode' = 'random', "
        "normalize: 'Normalize' = 'skip', protect: 'Protect' = None, min_size: 'int' = 1024, "
        "bucket_bytes: 'int' = 26214400, seed: 'int' = 0, "
    )
    assert list(inspect.signature(sr.all_reduce).parameters)[:5] == [
        *("x", "axis_name", "num_skipped", "shift", "normalize")
    ]


@pytest.mark.parametrize("name", [name for name in sr.__all__ if inspect.isfunction(getattr(sr, name))])
def test_public_functions_have_an_example(name):
    assert ">>> " in inspect.getdoc(getattr(sr, name))


def imported_modules(path):
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_run_one_way():
    assert {path.stem for path in PACKAGE.glob("_*.py")} - {
        "__init__",
        "__main__",
        "_cli",
        "_importance_figure",
    } == set(LAYERS)
    for number, layer in enumerate(LAYERS):
        imported = imported_modules(PACKAGE / f"{layer}.py")
        inside = {name.split(".")[1] for name in imported if name.startswith("jax_skipreduce.")}
        assert inside <= set(LAYERS[:number]), layer


def test_schedules_know_no_jax():
    for layer in ("_schedule", "_ring", "_reference"):
        assert not [name for name in imported_modules(PACKAGE / f"{layer}.py") if name.split(".")[0] == "jax"]


def test_the_core_needs_jax_optax_and_numpy_alone():
    allowed = {"jax", "optax", "numpy", "jax_skipreduce", "__future__", *sys.stdlib_module_names}
    for layer in LAYERS:
        imported = {name.split(".")[0] for name in imported_modules(PACKAGE / f"{layer}.py")}
        assert imported <= allowed, layer
    extras = ("typer", "rich", "matplotlib", "sklearn", "flax")
    extras += ("jax_skipreduce.netlab",)  # for Linux alone
    code = f"import sys, jax_skipreduce; print([m for m in {extras} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_starts_no_backend():
    code = (
        "import jax, jax_skipreduce as sr\n"
        "sr.skipreduce('data', lambda count: 0.5)\n"
        "from jax._src import xla_bridge\n"
        "print(xla_bridge.backends_are_initialized())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
