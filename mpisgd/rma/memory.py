"""`WindowMemory`: what a `Window` needs of the memory of all ranks, wherever it is."""

from typing import Protocol

from torch import Tensor

from mpisgd.dtypes import ReduceOp

__all__ = ["WindowMemory"]


class WindowMemory(Protocol):
    """The memory of all ranks of a group: flat tensors of one dtype, elements counted from 0.

    Ranks are those of the group. Arguments have been checked, and tensors are flat and contiguous.

    Attributes:
        mine: that of this rank.
        ends_with_rank: whether the loss of a rank ends it for the others.
    """

    mine: Tensor
    ends_with_rank: bool

    def local(self, rank: int) -> Tensor | None:
        """Return the memory of a rank as a tensor, None where it is on another host."""

    def check(self, name: str, dtype_op: ReduceOp | None) -> None:
        """Raise UnsupportedOp where the elements have no such arithmetic; None: no compare-and-swap."""

    def put(self, flat: Tensor, dst: int, start: int) -> None:
        """Write; `flat` may be used again at once."""

    def get(self, out: Tensor, src: int, start: int) -> None:
        """Read."""

    def accumulate(self, flat: Tensor, op: ReduceOp, dst: int, start: int) -> None:
        """Combine; `flat` may be used again at once."""

    def fetch_and_op(self, flat: Tensor, op: ReduceOp, dst: int, start: int) -> Tensor:
        """Combine, and return what was there before."""

    def compare_and_swap(self, expected: Tensor, desired: Tensor, dst: int, start: int) -> Tensor:
        """Write where the bits are the expected ones, and return what was there before."""

    def try_lock(self, rank: int) -> bool:
        """Take the lock of a rank's memory if it is free."""

    def unlock(self, rank: int) -> None:
        """Give it back; all that this rank has written before is visible to the next one that has it."""

    def holder(self, rank: int) -> int:
        """Return who has the lock, -1 where that is not known."""

    def lost_holder(self, rank: int) -> int:
        """Return who was lost while having the lock, before this rank took it; -1 for nobody."""

    def is_alive(self, rank: int) -> bool:
        """Return whether the process of a rank is known not to have ended."""

    def flush(self, rank: int | None) -> None:
        """Return when all writes of this rank, to one or to all, are complete."""

    def sync(self) -> None:
        """Let loads and stores of this rank's memory see what is complete, and be seen."""

    def free(self) -> None:
        """Give everything back. Collective."""
