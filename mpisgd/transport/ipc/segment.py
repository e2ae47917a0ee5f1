"""`Segment`: memory that the ranks of one host share.

It is a memfd (see `mpisgd.transport.ipc.memfd`): private, without a name to clean up, freed with the last
rank.
"""

import contextlib
import mmap
import os

import torch
from torch import Tensor

from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.threads.fault_points import ALLOCATE, may_fail
from mpisgd.transport.ipc.memfd import NAME, open_shared

__all__ = ["PAGE", "Segment", "open_segment"]

PAGE = mmap.PAGESIZE


class Segment:
    """`share_bytes` of memory for each rank of a host, all of it visible to all of them.

    The tensors made of it keep it alive; it goes away with the last of them, on the last rank.

    Args:
        fd: of the memory, kept open until `close_file`; -1: memory of this process alone.
        share_bytes: as below.
        size: ranks of the host.

    Attributes:
        share_bytes: room of each rank, a multiple of the page size.
    """

    def __init__(self, fd: int, share_bytes: int, size: int) -> None:
        self.share_bytes = share_bytes
        may_fail(ALLOCATE)
        self.memory = mmap.mmap(fd, share_bytes * size)
        self._fd = fd

    def close_file(self) -> None:
        """Close the descriptor, by which other processes find the memory. The memory stays."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def share(self, rank: int) -> Tensor:
        """Return the bytes of local rank `rank`, [share_bytes] of uint8."""
        return self.share_as(rank, self.share_bytes, torch.uint8)

    def share_as(self, rank: int, numel: int, dtype: torch.dtype, *, start: int = 0) -> Tensor:
        """Return `numel` elements of the share of `rank`, from its byte `start` on; a storage of its own."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        offset = rank * self.share_bytes + start
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)


def open_segment(local: GroupCommunicator, share_bytes: int, name: str = "") -> Segment | None:
    """Make a segment over the ranks of a host, None on all of them if one cannot have it. Collective.

    Args:
        local: the communicator of this host's ranks.
        share_bytes: room for each rank, rounded up to whole pages.
        name: what other processes find it by in /proc, as long as its file is open; "": they do not.
    """
    share_bytes = -(-share_bytes // PAGE) * PAGE
    fd = open_shared(local, share_bytes * local.size, name or NAME)
    segment = None
    with contextlib.suppress(OSError, ValueError):  # too little address space, say
        segment = Segment(fd, share_bytes, local.size) if fd >= 0 else None
    everyone = all(local.all_gather_object(segment is not None))  # then the first rank may close its own
    if segment is None and fd >= 0:
        os.close(fd)
    if segment is not None and not (name and everyone):
        segment.close_file()  # the mapping keeps the memory
    return segment if everyone else None
