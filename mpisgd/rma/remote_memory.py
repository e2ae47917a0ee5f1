"""`RemoteMemoryWindow`: the memory of a window's ranks on several hosts, by MPI's one-sided calls.

Without hardware for it (InfiniBand, say) MPI does a one-sided call by messages, which the target must take
care of: it does so when it is in some call of MPI. So a thread of every rank calls MPI now and then while any
window is open. Measured on two emulated hosts (Open MPI 5.0, TCP at 1 Gbit/s), the target asleep: reading
1 MiB took 20 ms with the thread, and without it until the target came to its next operation.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.errors import UnsupportedOp
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.threads.service_thread import ServiceThread
from mpisgd.threads.waiting import cancel_reason

if TYPE_CHECKING:
    from mpisgd.transport.mpi import MpiWindow

__all__ = ["RemoteMemoryWindow", "open_remote_memory"]

PROGRESS_S = 0.001  # between two calls of MPI; that costs 3 % of a core
# MPI's arithmetic of others is missing, or wrong in some library (see `mpisgd.transport.mpi_reduction`).
ARITHMETIC = (torch.float32, torch.float64, torch.complex64, torch.complex128, torch.int32, torch.int64)


class Progress:
    """The one thread of this process that calls MPI again and again while windows are open."""

    def __init__(self) -> None:
        self._num_windows = 0
        self._stopped = threading.Event()
        self._thread: ServiceThread | None = None

    def start(self) -> None:
        """Note that a window is open."""
        self._num_windows += 1
        if self._thread is None:
            self._stopped.clear()
            self._thread = ServiceThread("mpisgd window", self._serve)
            self._thread.start()

    def stop(self) -> None:
        """Note that one is open no more; with the last one the thread ends."""
        self._num_windows -= 1
        if self._num_windows == 0 and self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def _serve(self) -> bool:
        from mpisgd.transport.mpi import progress

        if self._stopped.wait(PROGRESS_S):
            return False
        progress()
        return True


_progress = Progress()


class RemoteMemoryWindow:
    """A `WindowMemory` of ranks on several hosts.

    The lock of a rank's memory is a word in a window of its own, 0 or the holder plus 1: MPI's own locks
    would end the epoch that lets everything else come at any time. A lost rank does not give it back.

    Once a rank of the job is lost calls raise `PeerLost`. One that waits for the lost rank at that moment
    does not return, and the monitor ends the job.
    """

    ends_with_rank = True

    def __init__(
        self,
        window: "MpiWindow",
        words: "MpiWindow",
        rank: int,
        mine: Tensor,
        *,
        has_thread: bool,
    ) -> None:
        self._window = window
        self._words = words
        self._name = torch.tensor([rank + 1])
        self._free = torch.zeros(1, dtype=torch.int64)
        self._has_thread = has_thread
        self.mine = mine

    def local(self, rank: int) -> Tensor | None:
        """Return None: MPI knows best where the memory is."""
        return None

    def check(self, name: str, dtype_op: ReduceOp | None) -> None:
        """Raise UnsupportedOp where MPI has no such arithmetic, or not on every library."""
        dtype = self.mine.dtype
        if dtype_op is None and dtype.itemsize > 8:
            raise UnsupportedOp(f"{name}: {dtype} has more than 8 bytes; compare and swap its parts")
        if dtype_op is not None and dtype not in ARITHMETIC:
            raise UnsupportedOp(
                f"{name}: between hosts MPI computes, and of {dtype} not on every library; take float32, "
                "float64, complex, int32 or int64, or lock(), get() and put()"
            )

    def put(self, flat: Tensor, dst: int, start: int) -> None:
        """Write."""
        _check_ranks()
        self._window.put(flat, dst, start)
        self._window.flush_local(dst)

    def get(self, out: Tensor, src: int, start: int) -> None:
        """Read."""
        _check_ranks()
        self._window.get(out, src, start)
        self._window.flush(src)

    def accumulate(self, flat: Tensor, op: ReduceOp, dst: int, start: int) -> None:
        """Combine."""
        _check_ranks()
        self._window.accumulate(flat, op.name, dst, start)
        self._window.flush_local(dst)

    def fetch_and_op(self, flat: Tensor, op: ReduceOp, dst: int, start: int) -> Tensor:
        """Combine, and return what was there before."""
        _check_ranks()
        before = torch.empty_like(flat)
        self._window.get_accumulate(flat, before, op.name, dst, start)
        self._window.flush(dst)
        return before

    def compare_and_swap(self, expected: Tensor, desired: Tensor, dst: int, start: int) -> Tensor:
        """Write where the bits are the expected ones, and return what was there before."""
        _check_ranks()
        before = torch.empty_like(expected)
        self._window.compare_and_swap(expected, desired, before, dst, start)
        self._window.flush(dst)
        return before

    def try_lock(self, rank: int) -> bool:
        """Take the lock of a rank's memory if it is free. Costs a round trip."""
        _check_ranks()
        before = torch.empty(1, dtype=torch.int64)
        self._words.compare_and_swap(self._free, self._name, before, rank, 0)
        self._words.flush(rank)
        return not before.item()

    def unlock(self, rank: int) -> None:
        """Give it back, once all that was written is complete."""
        _check_ranks()
        self._window.flush(rank)
        self._words.replace(self._free, rank, 0)
        self._words.flush(rank)

    def holder(self, rank: int) -> int:
        """Return who has the lock."""
        word = torch.empty(1, dtype=torch.int64)
        self._words.get(word, rank, 0)
        self._words.flush(rank)
        return int(word.item()) - 1

    def lost_holder(self, rank: int) -> int:
        """Return -1: a lock of a lost rank is never had again."""
        return -1

    def is_alive(self, rank: int) -> bool:
        """Return True: the loss of a rank ends the waits of all others."""
        return True

    def flush(self, rank: int | None) -> None:
        """Return when all writes of this rank, to one or to all, are complete."""
        if rank is None:
            self._window.flush_all()
        else:
            self._window.flush(rank)

    def sync(self) -> None:
        """Let loads and stores of this rank's memory see what is complete, and be seen."""
        self._window.sync()

    def free(self) -> None:
        """Free the windows. Collective."""
        self._words.free()
        self._window.free()
        if self._has_thread:
            _progress.stop()


def _check_ranks() -> None:
    """Raise PeerLost, or why else all waits of the job have ended."""
    if (reason := cancel_reason()) is not None:
        raise reason


def open_remote_memory(
    communicator: GroupCommunicator, numels: Sequence[int], dtype: torch.dtype, *, threads_allowed: bool
) -> RemoteMemoryWindow:
    """Make the memory. Collective.

    Args:
        communicator: the ranks.
        numels: elements of each.
        dtype: of the elements.
        threads_allowed: whether a thread may call MPI beside others.
    """
    from mpisgd.transport.mpi import MpiWindow, as_mpi  # importing it starts MPI

    rank = communicator.rank
    mine = torch.zeros(numels[rank], dtype=dtype)
    ranks = as_mpi(communicator)
    window = MpiWindow(ranks, mine)
    words = MpiWindow(ranks, torch.zeros(1, dtype=torch.int64))
    if threads_allowed:
        _progress.start()
    return RemoteMemoryWindow(window, words, rank, mine, has_thread=threads_allowed)
