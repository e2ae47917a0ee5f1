"""`FailureDetector`: notices that a rank of the job is gone, and frees all who wait for it.

MPI tells of a loss only those who are inside a call of its, on a communicator of the lost rank's. But ranks
of a host wait for each other in shared memory, where nobody tells them anything; and one that has learned of
the loss and gone on leaves others behind, waiting for it. So a thread of every rank looks now and then. What
it has seen, or heard from the one who has seen it, ends every wait of this process: ours raise `PeerLost`,
and MPI's calls return, since all communicators are revoked.

The same frees a rank that is blocked inside MPI at its time limit. Then nobody is lost, and every wait ends
with `CollectiveTimeout`. A communicator of its own tells the two apart; see
`mpisgd.transport.mpi.calls.set_apart`. Another one ends the job; see `mpisgd.monitor.job_abort`.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpisgd.core import waiting
from mpisgd.errors import CollectiveTimeout, MpisgdError, PeerLost
from mpisgd.monitor.job_abort import JobAbort
from mpisgd.transport.mpi import OVERDUE, revoke_all, set_apart

if TYPE_CHECKING:
    from mpisgd.monitor.process_inspector import ProcessIdentity
    from mpisgd.transport.mpi import Communicator

__all__ = ["FailureDetector"]

PERIOD_S = 0.05  # of looking; that costs 0.3 % of a core


class FailureDetector:
    """Looks after the ranks of `wire` from its making until `dismiss()`.

    Attributes:
        lost: ranks of the wire that are gone, as far as this rank has been told; None while nothing is
            amiss.
    """

    def __init__(self, wire: "Communicator") -> None:
        self.lost: list[int] | None = None
        self._wire = wire
        self._apart: Communicator | None = None
        self._ending: JobAbort | None = None
        self._is_retired = False
        self._dismissed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpisgd sentinel", daemon=True)
        waiting.take_back()
        self._thread.start()

    def _watch(self) -> None:
        amiss = self._is_retired
        while not self._dismissed.wait(PERIOD_S):
            if self._ending is not None and self._ending.is_called():
                self._ending.follow()
            if amiss:
                self._wire.lost()  # MPI's messages move
            else:
                amiss = self._look()

    def _look(self) -> bool:
        """Return whether anything is amiss; every wait is ended then."""
        if self._apart is not None and self._apart.is_revoked():
            _end_waits(CollectiveTimeout(OVERDUE))
        elif (lost := self._wire.lost()) or self._wire.is_revoked():
            self.lost = lost
            _end_waits(PeerLost(_told(lost)))
        else:
            return False
        return True

    def heed(self, seats: "Sequence[ProcessIdentity]", place: int) -> None:
        """Make it possible to end waits that take too long, and the job. Collective over the wire.

        Args:
            seats: of the ranks of this host.
            place: this rank's among them.
        """
        self._apart = self._wire.duplicate(apart=True)
        set_apart(self._apart)
        self._ending = JobAbort(self._wire, seats, place)

    def end_job(self, exit_code: int) -> None:
        """End all processes of the job, this one too."""
        assert self._ending is not None
        self._ending.call(exit_code, all_are_here=not self._is_retired)

    def end_overdue(self, reason: str) -> None:
        """End every wait of the job, since one of this rank's has passed its limit inside MPI.

        Where a rank turns out to be lost, that is the reason.
        """
        if not self._look() and self._apart is not None:
            self._apart.revoke()
            _end_waits(CollectiveTimeout(reason))

    def free(self) -> None:
        """Give the communicators back. Collective; after `dismiss`."""
        set_apart(None)
        if self._apart is not None and self._ending is not None:
            self._apart.free()
            self._ending.free()

    def retire(self) -> None:
        """Look for nothing but the end of the job from now on: what is amiss is known."""
        self.dismiss()
        self._is_retired = True
        self._dismissed.clear()
        self._thread = threading.Thread(target=self._watch, name="mpisgd sentinel", daemon=True)
        self._thread.start()

    def dismiss(self) -> None:
        """Look no more."""
        self._dismissed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _end_waits(error: MpisgdError) -> None:
    """End every wait of this process, and of those that share a communicator with it."""
    waiting.give_up(error)
    revoke_all()


def _told(lost: list[int]) -> str:
    if not lost:
        return "a rank of the job was lost, as another rank has found out"
    who = f"rank {lost[0]} of the job was" if len(lost) == 1 else f"ranks {lost} of the job were"
    return f"{who} lost: killed, or out of reach"
