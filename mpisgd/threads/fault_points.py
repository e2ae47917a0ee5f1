"""Where shared memory is allocated and a disk is written: what may fail at any time, a test lets fail here.

Only a scheduler of threads that stand for ranks does so (`mpisgd.transport.loopback`). Elsewhere these
functions do nothing.
"""

import io
from typing import Any

from mpisgd.threads.scheduling import scheduler

__all__ = ["ALLOCATE", "FSYNC", "RENAME", "WRITE", "DiskFile", "may_fail"]

ALLOCATE, WRITE, FSYNC, RENAME = "allocate", "write", "fsync", "rename"


def may_fail(kind: str) -> None:
    """Note that memory is allocated, or that a file is brought to the disk.

    Raises:
        OSError: a test wants it to fail.
    """
    if (own := scheduler()) is not None:
        own.at_fault_point(kind, 0)


class DiskFile(io.FileIO):
    """A file that is written without a buffer; a write may fail, or write less than it was given."""

    def write(self, data: Any, /) -> int:
        """Write some of the bytes; return how many.

        Raises:
            OSError: the disk is full, or a test says so.
        """
        with memoryview(data) as whole, whole.cast("B") as given:
            own = scheduler()
            taken = given.nbytes if own is None else own.at_fault_point(WRITE, given.nbytes)
            return super().write(given[:taken])
