"""A folder of checkpoints: atomic writes, and the removal of what was left unfinished.

runs/a/step-00000200.safetensors
runs/a/step-00000300.safetensors
runs/a/.step-00000400.safetensors.a1b2c3.tmp    being written, locked by its writer
"""

import contextlib
import fcntl
import io
import os
import re
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from mpisgd.threads.fault_points import FSYNC, RENAME, DiskFile, may_fail

__all__ = ["Folder", "make_folder", "open_regular", "remove_unfinished", "write_file"]

UNFINISHED = re.compile(r"\.step-[0-9]{8,}\.safetensors\..*\.tmp")


class Folder:
    """The files of a folder: a `mpisgd.checkpoint.storage.Storage`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def at(self, name: str) -> Path:
        """Return the path of a file."""
        return self._path / name

    def names(self) -> Iterable[str]:
        """Return the names of what is there; none where there is no folder."""
        try:
            return os.listdir(self._path)
        except FileNotFoundError:
            return []

    def is_file(self, name: str) -> bool:
        """Return whether there is a regular file; what cannot be looked at is an error, and not a no."""
        try:
            return stat.S_ISREG(os.stat(self.at(name)).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def open(self, name: str) -> tuple[io.BufferedIOBase, int]:
        """Open a file for reading; return it and its size in bytes. ValueError: it is no regular file."""
        file = open_regular(self.at(name))
        try:
            return file, os.fstat(file.fileno()).st_size
        except BaseException:
            file.close()
            raise

    def put(self, name: str, write: Callable[[BinaryIO], None], mode: int | None) -> None:
        """Let `write` write a file, see `write_file`."""
        write_file(self.at(name), write, mode)

    def delete(self, name: str) -> None:
        """Delete a file, unless another process has done so."""
        self.at(name).unlink(missing_ok=True)

    def prepare(self) -> None:
        """Make the folder, and delete what writers that have ended have left unfinished."""
        make_folder(self._path)
        remove_unfinished(self._path)

    def check_writable(self) -> None:
        """Make the folder, and write a file without a name."""
        make_folder(self._path)
        with tempfile.TemporaryFile(dir=self._path):
            pass


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading, unless it is a FIFO, a socket, a device or a folder: their open may block.

    Raises:
        ValueError: it is no regular file.
        OSError: it cannot be opened.
    """
    _check_regular(os.stat(path))  # before it is opened, which alone makes some devices act
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor))  # the name may mean another file by now
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"it is no regular file but a {_KINDS.get(stat.S_IFMT(status.st_mode), 'device')}")


_KINDS = {stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket", stat.S_IFDIR: "folder"}


# --- writing ------------------------------------------------------------------------------------------


def write_file(path: Path, write: Callable[[BinaryIO], None], mode: int | None = None) -> None:
    """Write a file atomically: it appears at `path` once it is complete and on the disk.

    A crash at any moment leaves the old file or the new one.

    Args:
        path: may exist.
        write: writes the content.
        mode: the permissions; by default those of the file that is replaced, or what the umask leaves.

    Raises:
        OSError: it could not be written; an older file is unchanged.
    """
    wanted = _mode_of(path) if mode is None else mode
    with _temporary_beside(path, private=wanted is not None) as (file, temporary):
        write(file)
        file.flush()
        if wanted is not None and stat.S_IMODE(os.fstat(file.fileno()).st_mode) != wanted:
            os.fchmod(file.fileno(), wanted)
        may_fail(FSYNC)
        os.fsync(file.fileno())  # the bytes first, then the name
        may_fail(RENAME)
        temporary.replace(path)
    _sync_folder(path.parent)


def _mode_of(path: Path) -> int | None:
    """Return the permissions of a file, None where there is none."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    return stat.S_IMODE(status.st_mode) & 0o777 if stat.S_ISREG(status.st_mode) else None


@contextlib.contextmanager
def _temporary_beside(path: Path, *, private: bool) -> Iterator[tuple[BinaryIO, Path]]:
    """A new file in the folder of `path`, locked, which is removed at the end unless it was renamed.

    Two writers of the same step, even of one process, have a file each. The lock tells `remove_unfinished`
    that it is being written, and ends with the process.
    """
    while True:
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        raw = DiskFile(os.open(temporary, flags, 0o600 if private else 0o666), "wb")
        with io.BufferedWriter(raw) as file:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
            if not os.fstat(file.fileno()).st_nlink:
                continue  # another writer's sweep came between the two calls above
            try:
                yield file, temporary
            finally:
                temporary.unlink(missing_ok=True)
            return


def make_folder(folder: Path) -> None:
    """Make a folder, and those above it, so that they are on the disk, too.

    Raises:
        OSError: it cannot be made.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):  # a folder is found after a crash once the one above it is on the disk
        with contextlib.suppress(PermissionError):  # one may be allowed to write to a folder, not to read it
            _sync_folder(made.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        may_fail(FSYNC)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- removing -----------------------------------------------------------------------------------------


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files whose writers have ended."""
    for path in folder.iterdir():
        if UNFINISHED.fullmatch(path.name):
            with contextlib.suppress(OSError, ValueError):
                _remove_unless_locked(path)


def _remove_unless_locked(path: Path) -> None:
    # For writing, though nothing is written: NFS gives exclusive locks to no other descriptor.
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_regular(os.fstat(descriptor))
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while it is being written
        path.unlink()
    finally:
        os.close(descriptor)
