"""What the programs of the command line have in common: files that they write, and how they refuse.

Imported by their commands alone: it needs typer.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NoReturn

import typer


def check_writable(path: Path | None) -> Path | None:
    """`path`, if a file can be written there. To be asked at once, not after an hour of work.

    Raises:
      typer.BadParameter: there is no such folder, or it is not writable.
    """
    if path is None:
        return None
    folder = path.absolute().parent
    if not folder.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {folder} to write it to")
    if not path.exists() and not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"{path}: the folder {folder} is not writable")
    return path


# Arguments of `typer.Option` for a file that is written.
OUTPUT_FILE: dict[str, Any] = {"dir_okay": False, "writable": True, "callback": check_writable}


def check_png(path: Path | None, option: str) -> None:
    """Refuses a picture that is not to be a PNG."""
    if path is not None and path.suffix.lower() != ".png":
        refuse(f"{path}: the name of a PNG file ends in .png", option)


def refuse(message: str, option: str | None) -> NoReturn:
    """Ends the command as typer does for a value that it can judge itself."""
    raise typer.BadParameter(message, param_hint=option)
