"""`MappedMemory`: tensors in a private file that is mapped into memory, for what is larger than memory.

The kernel writes their pages to the file when memory is short, and reads them when they are used. They are
tensors like any others, and the file is gone with the last of them.
"""

import math
import mmap
import os

import torch
from torch import Tensor

from mpisgd.sharding.offload.private_file import PAGE, PrivateFile, rounded_up

__all__ = ["MappedMemory"]


class MappedMemory:
    """Makes tensors in a file.

    Args:
        folder: where the file is.
        what: what is in it, for messages.

    Raises:
        OffloadError: the file cannot be made, or the disk is full.
    """

    def __init__(self, folder: str | os.PathLike[str], what: str) -> None:
        self._file = PrivateFile(folder, what)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a contiguous tensor; of less than a page, in ordinary memory."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < PAGE:
            return torch.empty(shape, dtype=dtype)
        start = self._file.allocate(rounded_up(nbytes, mmap.ALLOCATIONGRANULARITY))
        memory = mmap.mmap(self._file.fd, nbytes, offset=start)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)
