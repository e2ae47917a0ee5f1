"""`FailureDetector`: notices that a rank of the job was lost, and ends all waits for it.

MPI reports a loss only to ranks that are inside one of its calls, on a communicator of the lost rank's. But
ranks of a host wait for each other in shared memory, where nothing is reported; and one that has learned of
the loss and gone on leaves others behind, waiting for it. So a thread of every rank polls. What it has seen
itself, or by the revocation of a communicator, ends every wait of this process: ours raise `PeerLost`, and
MPI's calls return, since all communicators are revoked.

The same ends a call that is blocked inside MPI at its timeout. Then no rank is lost, and every wait ends
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

POLL_S = 0.05  # that costs 0.3 % of a core


class FailureDetector:
    """Notices lost ranks of `communicator` from its making until `stop()`.

    Attributes:
        lost: ranks of the communicator that are gone, as far as this rank knows; None before a failure.
    """

    def __init__(self, communicator: "Communicator") -> None:
        self.lost: list[int] | None = None
        self._communicator = communicator
        self._overdue: Communicator | None = None
        self._abort: JobAbort | None = None
        self._is_retired = False
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mpisgd failure detector", daemon=True)
        waiting.allow_waits()
        self._thread.start()

    def _run(self) -> None:
        has_failed = self._is_retired
        while not self._stopped.wait(POLL_S):
            if self._abort is not None and self._abort.is_called():
                self._abort.follow()
            if has_failed:
                self._communicator.lost()  # MPI's messages move
            else:
                has_failed = self._check()

    def _check(self) -> bool:
        """Return whether there is a failure; every wait is ended then."""
        if self._overdue is not None and self._overdue.is_revoked():
            _end_waits(CollectiveTimeout(OVERDUE))
        elif (lost := self._communicator.lost()) or self._communicator.is_revoked():
            self.lost = lost
            _end_waits(PeerLost(_loss_text(lost)))
        else:
            return False
        return True

    def enable_abort(self, processes: "Sequence[ProcessIdentity]", place: int) -> None:
        """Make `revoke` and `abort` possible. Collective over the communicator.

        Args:
            processes: of the ranks of this host.
            place: this rank's among them.
        """
        self._overdue = self._communicator.duplicate(apart=True)
        set_apart(self._overdue)
        self._abort = JobAbort(self._communicator, processes, place)

    def abort(self, exit_code: int) -> None:
        """End all processes of the job, this one too."""
        assert self._abort is not None
        self._abort.call(exit_code, all_are_here=not self._is_retired)

    def revoke(self, reason: str) -> None:
        """End every wait of the job, since one of this rank's has timed out inside MPI.

        Where a rank turns out to be lost, that is the reason.
        """
        if not self._check() and self._overdue is not None:
            self._overdue.revoke()
            _end_waits(CollectiveTimeout(reason))

    def free(self) -> None:
        """Give the communicators back. Collective; after `stop`."""
        set_apart(None)
        if self._overdue is not None and self._abort is not None:
            self._overdue.free()
            self._abort.free()

    def retire(self) -> None:
        """Notice nothing but the abort of the job from now on: the failure is known."""
        self.stop()
        self._is_retired = True
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, name="mpisgd failure detector", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _end_waits(error: MpisgdError) -> None:
    """End every wait of this process, and of those that share a communicator with it."""
    waiting.cancel_all(error)
    revoke_all()


def _loss_text(lost: list[int]) -> str:
    if not lost:
        return "a rank of the job was lost, as another rank has found out"
    who = f"rank {lost[0]} of the job was" if len(lost) == 1 else f"ranks {lost} of the job were"
    return f"{who} lost: killed, or out of reach"
