"""`Segment`: memory that the ranks of one host share.

It is a memfd: a file without a name, made by the first rank and opened by the others through that rank's
/proc entry. It needs no room in /dev/shm (64 MiB in a plain container), nobody else can open it, and the
kernel frees it when the last rank has gone, whatever way it went.
"""

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["PAGE", "Segment", "open_segment"]

PAGE = mmap.PAGESIZE


class Segment:
    """`share_bytes` of memory for each rank of a host, all of it visible to all of them.

    The tensors made of it keep it alive; it goes away with the last of them, on the last rank.

    Attributes:
        share_bytes: room of each rank, a multiple of the page size.
    """

    def __init__(self, fd: int, share_bytes: int, size: int) -> None:
        self.share_bytes = share_bytes
        self.memory = mmap.mmap(fd, share_bytes * size)

    def share(self, rank: int) -> Tensor:
        """Return the bytes of local rank `rank`, [share_bytes] of uint8."""
        return self.share_as(rank, self.share_bytes, torch.uint8)

    def share_as(self, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        """Return the first `numel` elements of the share of `rank`; a storage of its own."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=rank * self.share_bytes)


def open_segment(local: "Wire", share_bytes: int) -> Segment | None:
    """Make a segment over the ranks of a host, None on all of them if one cannot have it. Collective.

    Args:
        local: a wire over the ranks of this host.
        share_bytes: room for each rank, rounded up to whole pages.
    """
    share_bytes = -(-share_bytes // PAGE) * PAGE
    fd = _create(share_bytes * local.size) if local.rank == 0 else -1
    path, identity = local.broadcast_object(_address(fd), 0)
    if local.rank != 0:
        fd = _open(path, identity)
    everyone = all(local.all_gather_object(fd >= 0))  # after this the first rank may close its own
    segment = Segment(fd, share_bytes, local.size) if everyone else None
    if fd >= 0:
        os.close(fd)  # the mapping keeps the memory
    return segment


def _create(nbytes: int) -> int:
    """Return a new memfd of `nbytes`, -1 where there is no such thing."""
    fd = -1
    with contextlib.suppress(OSError, AttributeError):
        fd = os.memfd_create("mpisgd")
        os.ftruncate(fd, nbytes)
    return fd


def _address(fd: int) -> tuple[str, tuple[int, int]]:
    """Return where others find `fd`, and what tells it from any other file."""
    if fd < 0:
        return "", (0, 0)
    status = os.fstat(fd)
    return f"/proc/{os.getpid()}/fd/{fd}", (status.st_dev, status.st_ino)


def _open(path: str, identity: tuple[int, int]) -> int:
    """Open the first rank's memfd, -1 where that fails: another container, or other process ids."""
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return -1
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) == identity:
        return fd
    os.close(fd)
    return -1
