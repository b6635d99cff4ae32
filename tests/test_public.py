"""What is public stays, and imports run one way."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import jax_skipreduce as sr

PACKAGE = Path(sr.__file__).parent

# Each room may import those before it.
ROOMS = (
    "_topologies",
    "_workers",
    "_backends",
    "_collectives",
    "_gradients",
    "_fsdp",
    "_checks",
    "_transform",
    "_forecast",
    "_compressors",
    "_importance",
    "programs",
)


def test_public_names():
    assert sorted(sr.__all__) == [
        "CheckEveryState",
        "Description",
        "LeafDescription",
        "LeafImportance",
        "NativeInfo",
        "Protection",
        "SkipReduce",
        "SkipReduceState",
        "all_gather",
        "all_reduce",
        "by_path",
        "check_every",
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
        "state_specs",
        "time_limit",
    ]
    assert all(hasattr(sr, name) for name in sr.__all__)


@pytest.mark.parametrize("name", ["ImportanceState", "ImportanceTracker", "track_importance"])
def test_names_that_left_say_where_they_went(name):
    with pytest.raises(AttributeError, match=rf"jax_skipreduce\.{name}: .* examples/importance\.py"):
        getattr(sr, name)


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


def modules_of(room):
    return sorted((PACKAGE / room).rglob("*.py"))


def rooms_imported(path):
    return {
        parts[1]
        for name in imported_modules(path)
        if len(parts := name.split(".")) > 2 and parts[0] == "jax_skipreduce"
    }


def test_imports_run_one_way():
    assert {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists()} == set(ROOMS)
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py"}
    for number, room in enumerate(ROOMS):
        for path in modules_of(room):
            assert rooms_imported(path) <= set(ROOMS[: number + 1]), path


def test_schedules_know_no_jax():
    for path in modules_of("_topologies"):
        assert not [name for name in imported_modules(path) if name.split(".")[0] == "jax"], path


def test_the_core_needs_jax_optax_and_numpy_alone():
    allowed = {"jax", "optax", "numpy", "jax_skipreduce", "__future__", *sys.stdlib_module_names}
    for room in ROOMS[: ROOMS.index("programs")]:
        for path in modules_of(room):
            imported = {name.split(".")[0] for name in imported_modules(path)}
            assert imported <= allowed, path
    extras = ("typer", "rich", "matplotlib", "sklearn", "flax")
    extras += ("jax_skipreduce.programs.netlab",)  # for Linux alone
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
