"""Places for checkpoints whose calls are counted, and one of them fails: stores of fsspec, a folder."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from mpisgd.threads.fault_points import DiskFile

# What `mpisgd.checkpoint.files` asks the system for.
SYSTEM_CALLS = (
    *("open", "stat", "lstat", "fstat", "fchmod", "fsync", "rename", "replace", "unlink", "mkdir"),
    *("listdir", "scandir", "close"),
)


class Broken(Exception):
    """What the client of a store raises, which is no OSError."""


class Calls:
    """The calls of a place, in their order.

    Attributes:
        said: their names so far.
        fails_at: which one fails, from 1 on; 0: none.
        error: raised by it.
    """

    def __init__(self) -> None:
        self.said: list[str] = []
        self.fails_at = 0
        self.error: Callable[[str], Exception] = Broken

    def note(self, call: str) -> None:
        self.said.append(call)
        if len(self.said) == self.fails_at:
            raise self.error(call)

    def begin(self, fails_at: int = 0) -> None:
        self.said, self.fails_at = [], fails_at


calls = Calls()


class Failing:
    """What makes a file system of fsspec one whose calls are noted."""

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        calls.note("ls")
        return super().ls(path, detail, **options)  # type: ignore[misc]

    def info(self, path: str, **options: Any) -> Any:
        calls.note("info")
        return super().info(path, **options)  # type: ignore[misc]

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        calls.note("makedirs")
        super().makedirs(path, exist_ok)  # type: ignore[misc]

    def rm_file(self, path: str) -> None:
        calls.note("rm_file")
        super().rm_file(path)  # type: ignore[misc]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> FailingFile:
        calls.note(f"open {mode}")
        return FailingFile(super()._open(path, mode, **options))  # type: ignore[misc]


class FailingFile:
    """An open file of such a store."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> FailingFile:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def write(self, data: Any) -> Any:
        calls.note("write")
        return self._file.write(data)

    def readinto(self, memory: Any) -> Any:
        calls.note("readinto")
        return self._file.readinto(memory)

    def close(self) -> None:
        calls.note("close")
        self._file.close()

    def commit(self) -> None:
        calls.note("commit")
        self._file.commit()

    def discard(self) -> None:
        calls.note("discard")
        self._file.discard()


class FailingMemory(Failing, MemoryFileSystem):
    """A store in memory."""

    protocol = "failing"


class FailingFiles(Failing, LocalFileSystem):
    """A store over the files of this machine."""

    protocol = "failing-files"


@contextlib.contextmanager
def failing_stores() -> Iterator[Calls]:
    """Make `failing://` and `failing-files://` known, and empty the former at the end."""
    fsspec.register_implementation("failing", FailingMemory, clobber=True)
    fsspec.register_implementation("failing-files", FailingFiles, clobber=True)
    calls.begin()
    try:
        yield calls
    finally:
        calls.begin()
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]


@contextlib.contextmanager
def system_calls(fails_at: int = 0) -> Iterator[list[str]]:
    """Count the system calls of this thread, of which one fails as a disk does; yield their names."""
    thread, said = threading.get_ident(), list[str]()
    real = {name: getattr(os, name) for name in SYSTEM_CALLS}
    lock, write = fcntl.flock, DiskFile.write

    def noting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **options: Any) -> Any:
            if threading.get_ident() == thread:
                said.append(name)
                if len(said) == fails_at:
                    if name == "close":  # it has closed the file all the same, as Linux does
                        call(*args)
                    raise OSError(errno.EIO, f"Input/output error in {name}")
            return call(*args, **options)

        return noted

    for name, call in real.items():
        setattr(os, name, noting(name, call))
    fcntl.flock, DiskFile.write = noting("flock", lock), noting("write", write)  # type: ignore[method-assign]
    try:
        yield said
    finally:
        for name, call in real.items():
            setattr(os, name, call)
        fcntl.flock, DiskFile.write = lock, write  # type: ignore[method-assign]
