"""`PrivateFile`: a file without a name, which is gone with the process that has it open."""

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mpisgd.errors import OffloadError

__all__ = ["PAGE", "PrivateFile", "memory_of", "rounded_up"]

PAGE = 4096  # what direct I/O asks of offsets, sizes and addresses
NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS, errno.EISDIR, errno.ENOENT)


def rounded_up(nbytes: int, unit: int = PAGE) -> int:
    """Return the least multiple of a unit that is not smaller."""
    return -(-nbytes // unit) * unit


def memory_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor of the CPU as bytes."""
    array: Any = tensor.view(-1).view(torch.uint8).numpy()
    return memoryview(array)


class PrivateFile:
    """A `BlockStore` in a file that only this process can read, at a place in a folder.

    It never appears in the folder, or, where the file system has no unnamed files, for a moment and empty.

    Args:
        folder: made if need be.
        what: what is in it, for messages.
        direct: whether reads and writes go past the page cache, where the file system can do that.

    Attributes:
        folder: as given.
        what: as given.
        direct: whether they do.
        size: its bytes.

    Raises:
        OffloadError: it could not be made, written or read; says which, where and why.
    """

    def __init__(self, folder: str | os.PathLike[str], what: str, *, direct: bool = False) -> None:
        self.folder, self.what = Path(folder), what
        self.size = 0
        with self._errors("made"):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.fd = _open_unnamed(self.folder)
        self._close = weakref.finalize(self, os.close, self.fd)
        self.direct = direct and _go_past_the_cache(self.fd)

    @property
    def described(self) -> str:
        """See `BlockStore`."""
        return f"{self.what} in {self.folder}"

    def descriptor(self) -> int:
        """See `BlockStore`: its own."""
        return self.fd

    def allocate(self, nbytes: int) -> int:
        """Make room at the end; return where it begins.

        The blocks of the disk are taken now, so that a full disk is noticed here and not by a later write.
        """
        start = self.size
        with self._errors(f"extended by {nbytes} bytes"):
            _allocate(self.fd, start, nbytes)
        self.size += nbytes
        return start

    def truncate(self, size: int) -> None:
        """Give all room back but the first `size` bytes."""
        with self._errors("truncated"):
            os.ftruncate(self.fd, size)
        self.size = size

    def write(self, memory: memoryview, start: int) -> None:
        """Write all of `memory`, from a byte on."""
        with self._errors(f"written, {len(memory)} bytes at {start}"):
            done = 0
            while done < len(memory):
                done += os.pwritev(self.fd, [memory[done:]], start + done)

    def read(self, memory: memoryview, start: int) -> None:
        """Fill all of `memory`, from a byte on."""
        with self._errors(f"read, {len(memory)} bytes at {start}"):
            done = 0
            while done < len(memory):
                got = os.preadv(self.fd, [memory[done:]], start + done)
                if not got:
                    raise OSError(f"it ends at {start + done}")
                done += got

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        with self._errors("written"):
            os.fdatasync(self.fd)

    def drop_cache(self) -> None:
        """Let the kernel forget what it has in its page cache."""
        with self._errors("read"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file: its content is gone then."""
        self._close()

    @contextlib.contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            cause = exc.strerror or str(exc)
            raise OffloadError(
                f"offload: the file of {self.described} could not be {done}: {cause}{self._hint(exc)}"
            ) from exc

    def _hint(self, exc: OSError) -> str:
        if exc.errno != errno.ENOSPC:
            return ""
        try:
            free = shutil.disk_usage(self.folder).free
        except OSError:  # the folder was removed
            return f"; the file has {self.size} bytes"
        return f"; {free} bytes are free there, and the file has {self.size}"


def _open_unnamed(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in NOT_SUPPORTED or not folder.is_dir():
            raise
    fd, path = tempfile.mkstemp(prefix=".mpisgd-offload-", dir=folder)  # 0600
    os.unlink(path)
    return fd


def _allocate(fd: int, start: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, start, nbytes)
    except OSError as exc:
        if exc.errno not in NOT_SUPPORTED:
            raise
        os.ftruncate(fd, start + nbytes)


def _go_past_the_cache(fd: int) -> bool:
    """Turn on direct I/O for a file; return whether its file system has it."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True
