"""`ObjectStore`: checkpoints in what fsspec reaches: S3, Google Cloud Storage, HDFS, SFTP, memory.

A file appears at once by the means of its file system, which fsspec calls `commit`: S3 completes an upload in
parts, others rename a temporary file. Where there is no such thing, nothing is written. Nothing is locked: a
store that keeps parts of uploads that were not completed deletes them by its own rules.
"""

import contextlib
import io
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

from fsspec.core import url_to_fs

from mpisgd.errors import MpisgdError

__all__ = ["ObjectStore"]


class ObjectStore:
    """The files under a URL.

    Args:
        url: of what stands for a folder; credentials are found as fsspec's file system of its protocol does.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        with _os_errors(url):
            # An instance of its own, which no other thread opens files with, and which looks every time.
            found = url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
        self._fs: Any = found[0]
        self._root: str = found[1]

    def at(self, name: str) -> str:
        """Return the URL of a file."""
        return f"{self._url}/{name}"

    def names(self) -> Iterable[str]:
        """Return the names of what is there; none where there is nothing."""
        with _os_errors(self._url):
            try:
                found = self._fs.ls(self._root, detail=False)
            except FileNotFoundError:
                return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def is_file(self, name: str) -> bool:
        """Return whether there is a file; by `info`, since fsspec's `isfile` says no where a store fails."""
        with _os_errors(self.at(name)):
            try:
                return bool(self._fs.info(self._path(name))["type"] == "file")
            except FileNotFoundError:
                return False

    def open(self, name: str) -> tuple[io.BufferedIOBase, int]:
        """Open a file for reading; return it and its size in bytes. ValueError: it is no file."""
        with _os_errors(self.at(name)):
            info = self._fs.info(self._path(name))
            if info["type"] == "file":
                file = _Reader(self._fs.open(self._path(name), "rb"), self.at(name))
                return io.BufferedReader(file), int(info["size"])
        raise ValueError(f"it is no file but a {info['type']}")

    def put(self, name: str, write: Callable[[BinaryIO], None], mode: int | None) -> None:
        """Let `write` write a file, which appears once it is whole; until then an older one stays."""
        assert mode is None, "permissions are for files"
        with _os_errors(self.at(name)):
            transaction = self._fs.transaction  # in which files appear by their `commit`
            transaction.start()
            try:
                with self._fs.open(self._path(name), "wb") as file:
                    if not hasattr(file, "commit"):
                        transaction.files.clear()
                        kind = type(self._fs).__name__
                        raise OSError(f"{self.at(name)}: {kind} cannot replace a file at once")
                    write(file)
                transaction.complete()
            except BaseException:
                with contextlib.suppress(Exception):  # the first error is the one to be told
                    transaction.complete(commit=False)
                raise

    def delete(self, name: str) -> None:
        """Delete a file, unless another process has done so."""
        with _os_errors(self.at(name)), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def prepare(self) -> None:
        """Make what stands for a folder, where there are such."""
        with _os_errors(self._url):
            self._fs.makedirs(self._root, exist_ok=True)

    def check_writable(self) -> None:
        """Write something that is deleted again."""
        self.prepare()
        name = f".mpisgd-{secrets.token_hex(8)}"
        self.put(name, lambda file: None, None)
        self.delete(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _Reader(io.RawIOBase):
    """A file of fsspec's that raises OSError where it cannot be read."""

    def __init__(self, file: Any, where: str) -> None:
        self._file, self._where = file, where

    def readable(self) -> bool:
        """Return True."""
        return True

    def readinto(self, memory: Any, /) -> int:
        """Read into memory; return the number of bytes, 0 at the end."""
        with _os_errors(self._where):
            return int(self._file.readinto(memory))

    def close(self) -> None:
        """Close the file, too."""
        if not self.closed:
            with _os_errors(self._where):
                self._file.close()
        super().close()


@contextlib.contextmanager
def _os_errors(where: str) -> Iterator[None]:
    """Raise what a file system of fsspec raises as an OSError; each has exceptions of its own."""
    try:
        yield
    except (OSError, MpisgdError):
        raise
    except Exception as exc:
        raise OSError(f"{where}: {type(exc).__name__}: {exc}") from exc
