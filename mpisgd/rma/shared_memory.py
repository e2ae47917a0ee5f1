"""`SharedMemoryWindow`: the memory of a window's ranks on one host, which all of them have mapped."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.errors import CollectiveTimeout, UnsupportedOp
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.rma.patience import wait_patiently
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.transport.ipc.control_block import order_memory
from mpisgd.transport.ipc.record_locks import RecordLocks, open_record_locks
from mpisgd.transport.ipc.segment import PAGE, Segment, open_segment
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["SharedMemoryWindow", "open_shared_memory"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SharedMemoryWindow:
    """A `WindowMemory` of ranks that share a host. Nobody else has to do anything for a call to complete.

    Each rank's memory has two locks: one that programs take, and one around every atomic call, so that these
    work while the first is held. The kernel gives both back when their holder dies.
    """

    ends_with_rank = False

    def __init__(
        self,
        segment: Segment,
        locks: RecordLocks,
        numels: Sequence[int],
        rank: int,
        dtype: torch.dtype,
        timeout_s: float,
    ) -> None:
        self._tensors = [segment.share_as(r, numel, dtype) for r, numel in enumerate(numels)]
        self._locks = locks
        self._size = len(numels)
        self._timeout_s = timeout_s
        self.mine = self._tensors[rank]

    def local(self, rank: int) -> Tensor | None:
        """Return the memory of a rank."""
        return self._tensors[rank]

    def check(self, name: str, dtype_op: ReduceOp | None) -> None:
        """Raise UnsupportedOp for a compare-and-swap of elements of more than 8 bytes."""
        if dtype_op is None and self.mine.element_size() not in BITS:
            raise UnsupportedOp(
                f"{name}: {self.mine.dtype} has more than 8 bytes; compare and swap its parts"
            )

    def put(self, flat: Tensor, dst: int, start: int) -> None:
        """Write."""
        self._part(dst, start, flat.numel()).copy_(flat)

    def get(self, out: Tensor, src: int, start: int) -> None:
        """Read."""
        out.copy_(self._part(src, start, out.numel()))

    def accumulate(self, flat: Tensor, op: ReduceOp, dst: int, start: int) -> None:
        """Combine, in one turn of the target's."""
        with self._atomically(dst):
            part = self._part(dst, start, flat.numel())
            combine_in_rank_order([part, flat], op, out=part)

    def fetch_and_op(self, flat: Tensor, op: ReduceOp, dst: int, start: int) -> Tensor:
        """Combine, and return what was there before."""
        with self._atomically(dst):
            part = self._part(dst, start, flat.numel())
            before = part.clone()
            combine_in_rank_order([part, flat], op, out=part)
        return before

    def compare_and_swap(self, expected: Tensor, desired: Tensor, dst: int, start: int) -> Tensor:
        """Write where the bits are the expected ones, and return what was there before."""
        bits = BITS[self.mine.element_size()]
        with self._atomically(dst):
            part = self._part(dst, start, expected.numel())
            before = part.clone()
            equal = before.view(bits) == expected.view(bits)
            part.view(bits).copy_(torch.where(equal, desired.view(bits), before.view(bits)))
        return before

    def try_lock(self, rank: int) -> bool:
        """Take the lock of a rank's memory if it is free."""
        if not self._locks.try_lock(rank):
            return False
        order_memory()
        return True

    def unlock(self, rank: int) -> None:
        """Give it back."""
        order_memory()
        self._locks.unlock(rank)

    def holder(self, rank: int) -> int:
        """Return who has the lock, -1 where that is not known."""
        return self._locks.holder(rank)

    def lost_holder(self, rank: int) -> int:
        """Return who was lost while having the lock; -1 for nobody."""
        return self._locks.lost_holder(rank)

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank has not ended; the kernel knows."""
        return self._locks.is_alive(rank)

    def flush(self, rank: int | None) -> None:
        """Keep what was written before what will be."""
        order_memory()

    def sync(self) -> None:
        """Keep what was done before what will be."""
        order_memory()

    def free(self) -> None:
        """Give the locks back; the memory goes with the last tensor of it."""
        self._locks.close()

    def _part(self, rank: int, start: int, numel: int) -> Tensor:
        return self._tensors[rank][start : start + numel]

    @contextlib.contextmanager
    def _atomically(self, rank: int) -> Iterator[None]:
        """Hold the lock around atomic calls. A rank that died in one leaves elements before or after it."""
        lock = self._size + rank
        if not self._locks.try_lock(lock):
            reason = WaitReason(f"an atomic call on the memory of rank {rank} of a Window")
            if not wait_patiently(lambda: self._locks.try_lock(lock), self._timeout_s, lambda: reason):
                holder = self._locks.holder(lock)
                raise CollectiveTimeout(
                    f"Window: waited {self._timeout_s:.1f} s for rank {holder}, which is in an atomic call"
                )
        try:
            order_memory()
            yield
            order_memory()
        finally:
            self._locks.unlock(lock)


def open_shared_memory(
    local: GroupCommunicator, numels: Sequence[int], dtype: torch.dtype, timeout_s: float
) -> SharedMemoryWindow | None:
    """Make the memory, None on all ranks where one cannot have it. Collective.

    Args:
        local: all ranks, on one host.
        numels: elements of each.
        dtype: of the elements.
        timeout_s: how long an atomic call waits for others.
    """
    segment = open_segment(local, max(PAGE, max(numels) * dtype.itemsize))
    if segment is None:
        return None
    locks = open_record_locks(local, 2 * local.size)
    if locks is None:
        return None
    return SharedMemoryWindow(segment, locks, numels, local.rank, dtype, timeout_s)
