"""The end of all ranks at the wish of one, where MPI would end no other.

`MPI_Abort` of an MPI that outlives lost ranks ends the rank that calls it alone, if that (Open MPI 5.0.11
under `--with-ft ulfm`), and the others take it for lost. So the rank revokes a communicator that is there for
nothing else: the sentinel of every rank sees that and ends its process, whatever it does, and after a while
those of its host that are still there, as they are stopped, or in C code that keeps the interpreter's lock.
"""

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from mpisgd.monitor.process_inspector import ProcessIdentity, is_gone, is_stopped_or_gone

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["JobAbort"]

LEAVE_S = 1.5  # a sentinel looks 20 times a second
LOOK_S = 0.02
HAND_ON_S = 0.1  # MPI sends the word on


class JobAbort:
    """The end of the ranks of `wire`. Making one is collective over these.

    Args:
        wire: of the job's world.
        seats: of the ranks of this host, in their order.
        place: this rank's among them.
    """

    def __init__(self, wire: "Communicator", seats: Sequence[ProcessIdentity], place: int) -> None:
        self._wire = wire.duplicate(apart=True)
        self._before, self._behind = seats[:place], seats[place + 1 :]
        self._is_ours = False

    def is_called(self) -> bool:
        """Return whether another rank has called for it."""
        return not self._is_ours and self._wire.is_revoked()

    def call(self, exit_code: int, *, all_are_here: bool) -> NoReturn:
        """End all ranks; `exit_code` is the job's, unless a rank had to be killed.

        Args:
            all_are_here: whether all are in this world. Otherwise who does not hear of it may be in the next
                one, and only those that are stopped are killed.
        """
        self._is_ours = True
        self._wire.revoke()
        others = [*self._before, *self._behind]
        self._leave_after(others if all_are_here else _stopped(others), exit_code)

    def follow(self) -> NoReturn:
        """End this process, since another rank has called for it.

        Of those that do so each waits for the ranks behind it alone, or all would wait for each other.
        """
        self._leave_after([*_stopped(self._before), *self._behind], 0)

    def _leave_after(self, others: Sequence[ProcessIdentity], exit_code: int) -> NoReturn:
        time.sleep(HAND_ON_S)
        deadline_s = time.monotonic() + LEAVE_S
        while others and time.monotonic() < deadline_s:
            time.sleep(LOOK_S)
            others = [seat for seat in others if not is_gone(seat)]
        for seat in others:
            with contextlib.suppress(OSError):
                os.kill(seat.pid, signal.SIGKILL)
        os._exit(exit_code)

    def free(self) -> None:
        """Give the communicator back. Collective."""
        self._wire.free()


def _stopped(seats: Sequence[ProcessIdentity]) -> list[ProcessIdentity]:
    return [seat for seat in seats if is_stopped_or_gone(seat)]
