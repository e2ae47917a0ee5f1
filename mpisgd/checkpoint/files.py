"""The folder of checkpoints: names, atomic writes, and the removal of old files.

runs/a/step-00000200.safetensors
runs/a/step-00000300.safetensors
runs/a/.step-00000400.safetensors.4711.tmp      being written, locked by its writer
"""

import contextlib
import fcntl
import os
import re
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mpisgd import config

__all__ = ["checkpoints_in", "make_writable", "path_of", "remove_older", "remove_unfinished", "write_file"]

NAME = re.compile(r"step-(\d{8,})\.safetensors")
UNFINISHED = re.compile(r"\.step-\d{8,}\.safetensors\..*\.tmp")


def path_of(folder: Path, step: int) -> Path:
    """Return where the checkpoint of a step is."""
    return folder / f"step-{step:08d}.safetensors"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, -1 for any other file."""
    found = NAME.fullmatch(path.name)
    return int(found[1]) if found else -1


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, the newest first; none where there is no folder.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        found = [path for path in folder.iterdir() if step_of(path) >= 0]
    except FileNotFoundError:
        return []
    return sorted(found, key=step_of, reverse=True)


def write_file(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Write a file atomically: it appears at `path` once it is complete and on the disk.

    A crash at any moment leaves the old file or the new one.

    Raises:
        OSError: it could not be written; an older file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # for `remove_unfinished`; ends with us
            write(file)
            file.flush()
            os.fsync(file.fileno())  # the bytes first, then the name
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
    config.note(f"checkpoint {path}")


def make_writable(folder: Path) -> None:
    """Make a folder and check that it is writable.

    Raises:
        OSError: it is not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files whose writers have ended."""
    for path in folder.iterdir():
        if UNFINISHED.fullmatch(path.name):
            with contextlib.suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while it is being written
                path.unlink()


def remove_older(newest: Path, keep_last: int) -> None:
    """Remove all but `keep_last` of the checkpoints up to and including `newest`.

    Those of later steps belong to another run, and stay.
    """
    upto = [path for path in checkpoints_in(newest.parent) if step_of(path) <= step_of(newest)]
    for path in upto[keep_last:]:
        path.unlink(missing_ok=True)
