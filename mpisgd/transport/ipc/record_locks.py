"""`RecordLocks`: locks among the ranks of a host, which a rank that was killed does not keep.

Python has no atomic instruction on shared memory. The kernel's record locks on the bytes of a file need none,
and it gives them back when a process ends, whatever way. They do not keep threads of one process apart; a
lock of Python's does that as well.

Where ranks are threads of one process, the locks are those of open files, which each rank has its own of, and
a rank that is lost closes its own. Elsewhere they would not do: a child that was forked keeps them.
"""

import contextlib
import fcntl
import mmap
import os
import struct
import threading
import weakref

from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.threads.fault_points import ALLOCATE, may_fail
from mpisgd.threads.scheduling import scheduler
from mpisgd.transport.ipc.memfd import open_shared
from mpisgd.transport.ipc.segment import PAGE

__all__ = ["NOBODY", "RecordLocks", "open_record_locks"]

NOBODY = -1
WORD_BYTES = 8
FLOCK = "hhqqi4x"  # struct flock of Linux, on 64 bits


class RecordLocks:
    """Some locks, and for each rank whether its process is there still.

    The file has a word for each lock, which names its holder: a word that is set when the lock is free was
    left by a rank that was lost. The byte behind the locks that belongs to a rank is locked as long as the
    rank lives.

    Args:
        fd: of a file that all ranks have open, owned from now on. It must stay open, and no other descriptor
            of the same file be closed: the kernel would take that for the end of the process.
        num_locks: how many there are.
        rank: this one among those of the host.
        size: how many ranks there are.
    """

    def __init__(self, fd: int, num_locks: int, rank: int, size: int) -> None:
        self._fd = fd
        self._rank = rank
        self._first_life = num_locks
        may_fail(ALLOCATE)
        self._words = memoryview(mmap.mmap(fd, _file_bytes(num_locks, size))).cast("Q")
        self._threads = [threading.Lock() for _ in range(num_locks)]
        self._lost = [NOBODY] * num_locks
        own = scheduler()
        self._set = _set_for_process if own is None else _set_for_open_file
        self._close = weakref.finalize(self, os.close if own is None else _close_open_file, fd)
        if own is not None:
            own.at_loss(self._close)
        self._try(fcntl.LOCK_EX, self._first_life + rank)

    def try_lock(self, lock: int) -> bool:
        """Take a lock if it is free; return whether this thread has it now."""
        if not self._threads[lock].acquire(blocking=False):
            return False
        if not self._try(fcntl.LOCK_EX, lock):
            self._threads[lock].release()
            return False
        self._lost[lock] = self._words[lock] - 1
        self._words[lock] = self._rank + 1
        return True

    def unlock(self, lock: int) -> None:
        """Give a lock back that this rank holds."""
        self._words[lock] = 0
        self._set(self._fd, fcntl.LOCK_UN, lock)
        self._threads[lock].release()

    def holder(self, lock: int) -> int:
        """Return the rank that holds a lock, as far as can be seen; NOBODY."""
        return self._words[lock] - 1

    def lost_holder(self, lock: int) -> int:
        """Return the rank that was lost while it held this lock, before this rank took it; NOBODY."""
        return self._lost[lock]

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank has not ended."""
        if rank == self._rank:
            return True
        byte = self._first_life + rank
        if not self._try(fcntl.LOCK_SH, byte):
            return True
        self._set(self._fd, fcntl.LOCK_UN, byte)
        return False

    def close(self) -> None:
        """Give everything back; from now on this rank looks as if it had ended."""
        self._close()

    def _try(self, kind: int, byte: int) -> bool:
        with contextlib.suppress(BlockingIOError, PermissionError):
            self._set(self._fd, kind, byte)
            return True
        return False


def _set_for_process(fd: int, kind: int, byte: int) -> None:
    fcntl.lockf(fd, kind if kind == fcntl.LOCK_UN else kind | fcntl.LOCK_NB, 1, byte)


def _set_for_open_file(fd: int, kind: int, byte: int, length: int = 1) -> None:
    name = {fcntl.LOCK_EX: fcntl.F_WRLCK, fcntl.LOCK_SH: fcntl.F_RDLCK, fcntl.LOCK_UN: fcntl.F_UNLCK}[kind]
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack(FLOCK, name, os.SEEK_SET, byte, length, 0))


def _close_open_file(fd: int) -> None:
    _set_for_open_file(fd, fcntl.LOCK_UN, 0, 0)  # all: a mapping keeps the file open
    os.close(fd)


def open_record_locks(local: GroupCommunicator, num_locks: int) -> RecordLocks | None:
    """Make locks for the ranks of a host, None on all of them if one cannot have them. Collective."""
    fd = open_shared(local, _file_bytes(num_locks, local.size))
    locks = None
    with contextlib.suppress(OSError, ValueError):  # too little address space, say
        locks = RecordLocks(fd, num_locks, local.rank, local.size) if fd >= 0 else None
    if all(local.all_gather_object(locks is not None)):  # and nobody looks before all are known to live
        return locks
    if locks is not None:
        locks.close()
    elif fd >= 0:
        os.close(fd)
    return None


def _file_bytes(num_locks: int, size: int) -> int:
    return -(-(num_locks + size) * WORD_BYTES // PAGE) * PAGE
