"""`Sentinel`: notices that a rank of the job is gone, and frees all who wait for it.

MPI tells of a loss only those who are inside a call of its, on a communicator of the lost rank's. But ranks
of a host wait for each other in shared memory, where nobody tells them anything; and one that has learned of
the loss and gone on leaves others behind, waiting for it. So a thread of every rank looks now and then. What
it has seen, or heard from the one who has seen it, ends every wait of this process: ours raise `PeerLost`,
and MPI's calls return, since all communicators are revoked.
"""

import threading
from typing import TYPE_CHECKING

from mpisgd.comm import waiting
from mpisgd.comm.mpi import revoke_all

if TYPE_CHECKING:
    from mpisgd.comm.mpi import Wire

__all__ = ["Sentinel"]

PERIOD_S = 0.05  # of looking; that costs 0.3 % of a core


class Sentinel:
    """Looks after the ranks of `wire` from its making until `dismiss()`.

    Attributes:
        lost: ranks of the wire that are gone, as far as this rank has been told; None while nothing is
            amiss.
    """

    def __init__(self, wire: "Wire") -> None:
        self.lost: list[int] | None = None
        self._wire = wire
        self._dismissed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="mpisgd sentinel", daemon=True)
        waiting.take_back()
        self._thread.start()

    def _watch(self) -> None:
        while not self._dismissed.wait(PERIOD_S):
            if lost := self._wire.lost():
                self.raise_alarm(lost)
                return
            if self._wire.is_revoked():
                self.raise_alarm([])
                return

    def raise_alarm(self, lost: list[int]) -> None:
        """End every wait of this process, and of those that share a communicator with it."""
        self.lost = lost
        waiting.give_up(_told(lost))
        revoke_all()

    def dismiss(self) -> None:
        """Look no more."""
        self._dismissed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _told(lost: list[int]) -> str:
    if not lost:
        return "a rank of the job was lost, as another rank has found out"
    who = f"rank {lost[0]} of the job was" if len(lost) == 1 else f"ranks {lost} of the job were"
    return f"{who} lost: killed, or out of reach"
