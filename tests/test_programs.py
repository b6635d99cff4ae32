"""The programs stand side by side: each uses its own modules, `common`, and what a package exports."""

import ast
from pathlib import Path

import pytest

import jax_skipreduce as sr

PACKAGE = Path(sr.__file__).parent
PROGRAMS = PACKAGE / "programs"
NAMES = sorted(path.name for path in PROGRAMS.iterdir() if (path / "__init__.py").exists())
BENCHMARKS = PACKAGE.parent / "benchmarks"


def imported(path):
    """The names that a file imports anywhere, with the modules that they come from."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def private_of_others(path, own):
    """Imports of private modules, and of private names, of other programs than `own`."""
    found = set()
    for name in imported(path):
        parts = name.split(".")
        if parts[:2] == ["jax_skipreduce", "netlab"]:  # the public name of one of them
            parts[1:2] = ["programs", "netlab"]
        if parts[:2] == ["jax_skipreduce", "programs"] and len(parts) > 2 and parts[2] != own:
            found |= {name} if any(part.startswith("_") for part in parts[3:]) else set()
    return found


def programs_used(path):
    return {
        "netlab" if parts[1] == "netlab" else parts[2]
        for parts in (name.split(".") for name in imported(path))
        if parts[:2] == ["jax_skipreduce", "netlab"] or (parts[:2] == ["jax_skipreduce", "programs"] and len(parts) > 2)
    }


def test_the_programs():
    assert NAMES == ["bench", "common", "demo", "netlab", "tta"]


@pytest.mark.parametrize("program", NAMES)
def test_no_program_imports_a_private_module_of_another(program):
    for path in sorted((PROGRAMS / program).rglob("*.py")):
        assert private_of_others(path, program) == set(), path


@pytest.mark.parametrize("program", NAMES)
def test_programs_use_what_is_common_and_the_lab(program):
    used = set().union(*(programs_used(path) for path in (PROGRAMS / program).rglob("*.py")))
    allowed = {"common"} if program == "common" else {"common", "netlab", program}
    assert used <= allowed


def test_what_is_common_is_not_private():
    assert [path.name for path in (PROGRAMS / "common").glob("_*.py")] == ["__init__.py"]


@pytest.mark.parametrize("path", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_no_benchmark_imports_a_private_module_of_a_program(path):
    assert private_of_others(path, None) == set()
