"""The program `skipreduce`, also `python -m jax_skipreduce`."""

from __future__ import annotations

import sys
from typing import Any

# What the extra `demo` installs, by the name it is imported under.
_OF_THE_EXTRA = ("flax", "matplotlib", "rich", "sklearn", "typer")


def make_app() -> Any:
    """The typer app with all subcommands."""
    import typer

    from jax_skipreduce.demo._command import demo

    app = typer.Typer(no_args_is_help=True, add_completion=False)

    # With a callback the program keeps its subcommand even where there is only one.
    @app.callback()
    def skipreduce() -> None:
        """Data-parallel training in JAX over slow links, with an all-reduce that skips steps."""

    app.command()(demo)
    return app


def main() -> None:
    """Runs the command line, and says how to get what it lacks."""
    try:
        make_app()(prog_name="skipreduce")
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if name not in _OF_THE_EXTRA:
            raise
        sys.exit(f"skipreduce needs {name}, which is not installed: pip install 'jax-skipreduce[demo]'")


if __name__ == "__main__":
    main()
