"""`PeerAccess`: how long the other ranks of a host may write into memory of this one.

A rank that leaves an operation before its end, at a timeout or by an interrupt, may free memory that a late
rank would still write to. So a writer announces itself, and checks first that all still grant access; and a
rank that revokes its grant announces that, and waits until nobody writes:

    rank 0    writes ... | checks: all grant | writes | checks: rank 1 has revoked. Writes nothing more
    rank 1    timeout ...................... revokes, waits ......... | returns
"""

import time

from torch import Tensor

from mpisgd.transport.ipc.control_block import ControlBlock

__all__ = ["PeerAccess"]

# Words of the control block: whether a rank accesses others' memory; whether it has revoked access to its
# own; the address that it grants access to.
ACCESSES, REVOKED, ADDRESS = 32, 40, 48
SETTLED_S = 0.01  # what others had begun to write when this rank revoked its grant has reached it by then
WRITER_TIMEOUT_S = 2.0  # a rank that still seems to write then is stopped or dead in the middle of it

_kept: list[Tensor] = []


class PeerAccess:
    """The memory of this rank that others may write to at the moment, and what they announce.

    Args:
        control: the words of the host's ranks.

    Attributes:
        is_revoked: whether this rank has revoked a grant; then it grants nothing any more.
    """

    def __init__(self, control: ControlBlock) -> None:
        self._control = control
        self._granted: Tensor | None = None
        self.is_revoked = False

    def grant(self, tensor: Tensor | None, address: int = 0) -> None:
        """Let the others read and write `tensor`, at `address`, from now on; None: nothing.

        They read the address after the next barrier, and another one follows after that.
        """
        self._granted = tensor
        self._control.write(ADDRESS, address)

    def addresses(self) -> list[int]:
        """Return the address that each local rank grants access to, 0 for none."""
        return self._control.read_all(ADDRESS)

    def end(self) -> None:
        """End the grant: all have written what they wanted to."""
        self._granted = None

    def begin_access(self) -> bool:
        """Say that this rank uses others' memory; False where one has revoked its grant, and it must not."""
        self._control.write(ACCESSES, 1)
        if any(self._control.read_all(REVOKED)):
            self.end_access()
            return False
        return True

    def end_access(self) -> None:
        """Say that this rank does so no more."""
        self._control.write(ACCESSES, 0)

    def revoke(self) -> None:
        """Leave an operation before its end: return when nobody writes here any more.

        Should that not come, the memory is kept for ever, so that nobody else gets it.
        """
        self.end_access()
        if self._granted is None:
            return
        self.is_revoked = True
        self._control.write(REVOKED, 1)
        time.sleep(SETTLED_S)  # also orders the word before and those after it
        deadline_s = time.monotonic() + WRITER_TIMEOUT_S
        while any(self._control.read_all(ACCESSES)):
            if time.monotonic() > deadline_s:
                _kept.append(self._granted)
                break
            time.sleep(SETTLED_S)
        self._granted = None
