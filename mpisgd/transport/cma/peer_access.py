"""`PeerAccess`: how long the other ranks of a host may write into memory of this one.

Whoever leaves an operation before its end, at a time limit or by an interrupt, may free memory that a rank
which comes late would still write to. So who writes says so, and looks first whether all are still there; and
who leaves says so, and waits until nobody writes:

    rank 0    writes ... | looks: all there | writes | looks: rank 1 leaves. Writes nothing more
    rank 1    time limit ................ leaves, waits ......... | goes
"""

import time
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from mpisgd.transport.shm.control_block import ControlBlock

__all__ = ["PeerAccess"]

SETTLED_S = 0.01  # what others had begun to say when this rank left has reached it by then
GIVE_UP_S = 2.0  # who still seems to write then is stopped or dead in the middle of it

_kept: list[Tensor] = []


class PeerAccess:
    """The memory of this rank that others may write to at the moment, and what they say of it.

    Args:
        control: the words of the host's ranks.
    """

    def __init__(self, control: "ControlBlock") -> None:
        self._control = control
        self._exposed: Tensor | None = None
        self.has_left = False

    def begin(self, tensor: Tensor | None) -> None:
        """Let the others read and write `tensor` from now on; None: nothing."""
        self._exposed = tensor

    def end(self) -> None:
        """Note that all have written what they wanted to."""
        self._exposed = None

    def begin_writing(self) -> bool:
        """Say that this rank uses others' memory; False where one has left, and it must not."""
        return self._control.begin_writing()

    def end_writing(self) -> None:
        """Say that this rank does so no more."""
        self._control.end_writing()

    def leave(self) -> None:
        """Leave an operation before its end: return when nobody writes here any more.

        Should that not come, the memory is kept for ever, so that nobody else gets it.
        """
        self.end_writing()
        if self._exposed is None:
            return
        self.has_left = True
        self._control.say_left()
        time.sleep(SETTLED_S)  # also orders the word before and those after it
        deadline_s = time.monotonic() + GIVE_UP_S
        while self._control.somebody_writes():
            if time.monotonic() > deadline_s:
                _kept.append(self._exposed)
                break
            time.sleep(SETTLED_S)
        self._exposed = None
