"""Who owns which lab, so that what a killed launcher left is found and removed, and nothing else ever is.

Each lab has a record, a file whose name is the lab's id. Its launcher holds a lock on it for as long as it lives; the
kernel lets go of the lock when the launcher dies. So a record that can be locked is of a lab without an owner. It is
written before anything is made and removed after everything is: what has no record is not ours, whatever its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from jax_skipreduce.programs.netlab._commands import ETC_NETNS, LabError
from jax_skipreduce.programs.netlab._plan import PREFIX
from jax_skipreduce.programs.netlab._processes import NETNS
from jax_skipreduce.programs.netlab._removal import remove_namespaces

RECORDS = Path("/run/skipreduce")
_SUFFIX = ".lab"


@contextlib.contextmanager
def owned_lab() -> Iterator[str]:
    """A new lab's id. At the end, the lab's namespaces and files are removed, then its record.

    Leftovers of labs whose launcher is dead are removed first.
    """
    RECORDS.mkdir(parents=True, exist_ok=True)
    with _alone():
        _remove_leftovers()
        lab_id, record = _new_record()
    try:
        yield lab_id
    finally:
        # If something cannot be removed, the record stays, without an owner: the next lab tries again.
        with record:
            remove_lab(lab_id)
            _path(lab_id).unlink(missing_ok=True)


def remove_lab(lab_id: str) -> None:
    """Removes the namespaces and files of a lab, and kills what runs in them."""
    start = f"{PREFIX}{lab_id}-"
    names = {path.name for folder in (NETNS, ETC_NETNS) if folder.is_dir() for path in folder.glob(f"{start}*")}
    remove_namespaces(sorted(names))


def _remove_leftovers() -> None:
    for path in sorted(RECORDS.glob(f"*{_SUFFIX}")):
        try:
            record = path.open("r+")
        except FileNotFoundError:
            continue  # Its lab has ended since.
        with record:
            if _lock(record):
                # What cannot be removed must not keep new labs from starting. Names differ, so it is in nobody's way.
                with contextlib.suppress(LabError):
                    remove_lab(path.name.removesuffix(_SUFFIX))
                    path.unlink(missing_ok=True)


def _new_record() -> tuple[str, IO[str]]:
    while True:
        lab_id = secrets.token_hex(3)
        with contextlib.suppress(FileExistsError):
            record = _path(lab_id).open("x")
            break
    if not _lock(record):
        raise LabError(f"{_path(lab_id)}: it was just made, and another process has locked it")
    # For people who wonder whose it is.
    record.write(f"{os.getpid()}\n")
    record.flush()
    return lab_id, record


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Between making a record and locking it, nobody may look for records without an owner."""
    with (RECORDS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _lock(record: IO[str]) -> bool:
    try:
        fcntl.flock(record, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _path(lab_id: str) -> Path:
    return RECORDS / f"{lab_id}{_SUFFIX}"
