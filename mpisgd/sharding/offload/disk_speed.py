"""How fast a folder's disk is past the page cache and through it: what `Offload(io="auto")` decides by."""

import functools
import os
import time
from collections.abc import Callable
from typing import NamedTuple

from mpisgd.sharding.offload.block_cache import aligned_memory
from mpisgd.sharding.offload.block_store import BlockStore
from mpisgd.sharding.offload.description import Offload
from mpisgd.sharding.offload.private_file import PrivateFile, memory_of, rounded_up

__all__ = ["DiskSpeed", "blocks_of", "is_direct_faster", "measure"]

SAMPLE_BYTES = 32 * 2**20


class DiskSpeed(NamedTuple):
    """Bytes per second, of one thread."""

    read: float
    write: float

    def time_of(self, read: int, written: int) -> float:
        """Return the seconds for so many bytes, one after the other."""
        return read / self.read + written / self.write


def measure(
    folder: str | os.PathLike[str], block_bytes: int, nbytes: int, *, direct: bool
) -> DiskSpeed | None:
    """Write blocks and read them again, from the disk itself; return None where there is no direct I/O.

    Raises:
        OffloadError: the disk is full, or fails.

    Cost: `nbytes` are written and read; one block of memory.
    """
    file = PrivateFile(folder, "the measurement of the disk", direct=direct)
    if file.direct != direct:
        return None
    block = rounded_up(block_bytes)
    memory = memory_of(aligned_memory(block))
    starts = range(0, max(nbytes, block), block)
    file.allocate(len(starts) * block)

    def write() -> None:
        for start in starts:
            file.write(memory, start)
        file.sync()

    def read() -> None:
        for start in starts:
            file.read(memory, start)

    size = len(starts) * block
    written = _seconds(write)
    file.drop_cache()
    speed = DiskSpeed(size / _seconds(read), size / written)
    file.close()
    return speed


@functools.cache  # once for all files of a folder
def is_direct_faster(offload: Offload) -> bool:
    """Return whether blocks go past the page cache faster than through it, to and from the disk."""
    if offload.io != "auto" or offload.folder is None:
        return offload.io == "direct"
    sample = max(SAMPLE_BYTES, 2 * offload.block_bytes)
    direct = measure(offload.folder, offload.block_bytes, sample, direct=True)
    if direct is None:
        return False
    buffered = measure(offload.folder, offload.block_bytes, sample, direct=False)
    return buffered is None or direct.time_of(sample, sample) <= buffered.time_of(sample, sample)


def blocks_of(offload: Offload, what: str) -> BlockStore:
    """Return a new file for blocks.

    Args:
        offload: where it is, and how it is read and written.
        what: what is in it, for messages.

    Raises:
        OffloadError: it cannot be made.
    """
    assert offload.folder is not None
    return PrivateFile(offload.folder, what, direct=is_direct_faster(offload))


def _seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return max(time.perf_counter() - start, 1e-9)
