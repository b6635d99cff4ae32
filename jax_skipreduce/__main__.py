"""The program `skipreduce`, also `python -m jax_skipreduce`."""

from __future__ import annotations

import sys
from typing import Any

import jax_skipreduce

# The extra that installs what a subcommand needs, by the name under which that is imported.
_EXTRAS = {"flax": "demo", "matplotlib": "demo", "rdata": "lab", "rich": "demo", "sklearn": "demo", "typer": "demo"}


def make_app() -> Any:
    """The typer app with all subcommands."""
    import typer

    from jax_skipreduce.programs.bench._command import bench
    from jax_skipreduce.programs.demo._command import demo
    from jax_skipreduce.programs.netlab._command import lab
    from jax_skipreduce.programs.tta._command import tta

    app = typer.Typer(no_args_is_help=True, add_completion=False)

    def print_version(is_asked: bool) -> None:
        if is_asked:
            typer.echo(jax_skipreduce.__version__)
            raise typer.Exit

    version_option: bool = typer.Option(
        False, "--version", help="Print the version.", callback=print_version, is_eager=True
    )

    # With a callback the program keeps its subcommand even where there is only one.
    @app.callback()
    def skipreduce(version: bool = version_option) -> None:
        """Data-parallel training in JAX over slow links, with an all-reduce that skips steps."""

    app.command()(demo)
    app.command()(bench)
    # What follows the command belongs to the command, also without --.
    app.command(context_settings={"allow_interspersed_args": False})(lab)
    app.command()(tta)
    return app


def main() -> None:
    """Runs the command line, and says how to get what it lacks."""
    try:
        make_app()(prog_name="skipreduce")
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _EXTRAS:
            raise
        sys.exit(f"skipreduce needs {name}, which is not installed: pip install 'jax-skipreduce[{_EXTRAS[name]}]'")


if __name__ == "__main__":
    main()
