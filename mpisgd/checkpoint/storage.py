"""`Storage`: where checkpoints are, a folder or what fsspec reaches, and their names in it."""

import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, Protocol, TypeAlias

from mpisgd.arguments import as_path
from mpisgd.checkpoint.files import Folder

__all__ = [
    "Location",
    "Storage",
    "as_location",
    "checkpoints_in",
    "find",
    "name_of",
    "remove_older",
    "step_of",
    "storage_at",
]

Location: TypeAlias = Path | str  # of a file or a folder; a text is a URL

NAME = re.compile(r"step-([0-9]{8,})\.safetensors")
URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::|://)")


class Storage(Protocol):
    """The files of one place, by their names. What cannot be done raises OSError."""

    def at(self, name: str) -> Location:
        """Return where a file is."""

    def names(self) -> Iterable[str]:
        """Return the names of what is there; none where there is no such place yet."""

    def is_file(self, name: str) -> bool:
        """Return whether there is a file, and not a folder or a device."""

    def open(self, name: str) -> tuple[io.BufferedIOBase, int]:
        """Open a file for reading; return it and its size in bytes. ValueError: it is no file."""

    def put(self, name: str, write: Callable[[BinaryIO], None], mode: int | None) -> None:
        """Let `write` write a file, which appears once it is whole; until then an older one stays.

        `mode` is its permissions; None: what is usual there.
        """

    def delete(self, name: str) -> None:
        """Delete a file, unless another process has done so."""

    def prepare(self) -> None:
        """Make the place, and delete what writers that have ended have left unfinished."""

    def check_writable(self) -> None:
        """Make the place, and write something that is deleted again."""


def as_location(kind: str, what: str, value: object) -> Location:
    """Return `value` as a path, or as a URL without slashes at its end; or raise InvalidArgument.

    Whether fsspec reaches a URL is found where it is used: one rank may have a package that others lack.

    Args:
        kind: of the operation, for messages.
        what: the argument's name.
        value: a path, or a URL such as "s3://bucket/runs/a"; one of local files is a path.
    """
    if not isinstance(value, str) or URL.match(value) is None:
        return as_path(kind, what, value)
    protocol, mark, place = value.partition("://")
    if protocol in ("file", "local"):
        return as_path(kind, what, place)
    return protocol + mark + place.rstrip("/")


def storage_at(folder: Location) -> Storage:
    """Return the storage of a folder."""
    if isinstance(folder, Path):
        return Folder(folder)
    from mpisgd.checkpoint.object_store import ObjectStore

    return ObjectStore(folder)


def find(location: Location) -> tuple[Storage, str | None]:
    """Return the storage in which a file is, and its name; None as the name where `location` is no file."""
    if isinstance(location, Path):
        if location.exists() and not location.is_dir():
            return Folder(location.parent), location.name
    else:
        protocol, mark, place = location.partition("://")
        folder, _, name = place.rpartition("/")
        if name and (storage := storage_at(protocol + mark + folder)).is_file(name):
            return storage, name
    return storage_at(location), None


def name_of(step: int) -> str:
    """Return the name of the checkpoint of a step."""
    return f"step-{step:08d}.safetensors"


def step_of(name: str) -> int:
    """Return the step of a checkpoint, -1 for any other name."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found else -1


def checkpoints_in(storage: Storage) -> list[str]:
    """Return the names of the checkpoints, the newest first.

    Raises:
        OSError: they cannot be listed.
    """
    return sorted((name for name in storage.names() if step_of(name) >= 0), key=step_of, reverse=True)


def remove_older(storage: Storage, newest: str, keep_last: int) -> None:
    """Remove all but `keep_last` of the checkpoints up to and including `newest`.

    Those of later steps belong to another run, and stay. So does what is no file, whatever its name.
    """
    upto = [name for name in checkpoints_in(storage) if step_of(name) <= step_of(newest)]
    for name in [name for name in upto if storage.is_file(name)][keep_last:]:
        storage.delete(name)
