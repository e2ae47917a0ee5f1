"""`FailureDetector`: notices that a rank of the job was lost, and ends all waits for it, or the job.

MPI reports a loss only to ranks that are inside one of its calls, on a communicator of the lost rank's. But
ranks of a host wait for each other in shared memory, where nothing is reported; and one that has learned of
the loss and gone on leaves others behind, waiting for it. So a thread of every rank polls. What it has seen
itself, or by the revocation of a communicator, ends every wait of this process: ours raise `PeerLost`, and
MPI's calls return, since all communicators are revoked.

Two communicators are there for nothing but to be revoked, and so to tell all ranks something else:

- A call has been blocked inside MPI for longer than its timeout. Then no rank is lost, and every wait ends
  with `CollectiveTimeout`; see `FaultTolerance.set_apart`.
- The job ends. `MPI_Abort` of an MPI that outlives lost ranks ends the rank that calls it alone, if that
  (Open MPI 5.0.11 under `--with-ft ulfm`), and the others take it for lost. So every rank that sees the
  revocation ends its process, whatever it does, and after a while those of its host that are still there, as
  they are stopped, or in C code that keeps the interpreter's lock.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from mpisgd.arguments import ranks_text
from mpisgd.core.failure_scope import FailureScope
from mpisgd.errors import CollectiveTimeout, MpisgdError, PeerLost
from mpisgd.monitor.process_inspector import ProcessIdentity, is_gone, is_stopped_or_gone
from mpisgd.threads import waiting
from mpisgd.threads.service_thread import ServiceThread

__all__ = ["FailureDetector", "FaultTolerance"]

POLL_S = 0.05  # that costs 0.3 % of a core
PROPAGATE_S = 0.1  # MPI sends the revocation on
EXIT_S = 1.5  # every rank polls 20 times a second
EXIT_POLL_S = 0.02


class FaultTolerance(Protocol):
    """What an MPI that outlives lost ranks is asked for, and whatever stands in its place.

    Attributes:
        overdue: the message of waits that end since a call of another rank was blocked for too long.
    """

    overdue: str

    def wait_for_news(self, stopped: threading.Event, limit_s: float) -> bool:
        """Wait until a rank may have been lost, for so long at most; return whether `stopped` is set."""

    def revoke_all(self) -> None:
        """End whatever goes on over any communicator, here and on all ranks that it reaches."""

    def set_apart(self, communicator: Any) -> None:
        """Let this communicator, None for none, tell why others are revoked."""

    def free_abandoned(self) -> None:
        """Free the memory of what was given up, once nothing writes to it."""


class FailureDetector:
    """Notices lost ranks from its making until `stop()`.

    Args:
        communicator: of the ranks; it tells which are lost, and whether it was revoked.
        fault_tolerance: see there.

    Attributes:
        scopes: what goes on after a loss, unless one of its own ranks is lost.
    """

    def __init__(self, communicator: Any, fault_tolerance: FaultTolerance) -> None:
        self._fault_tolerance = fault_tolerance
        self._communicator = communicator
        self.scopes: list[FailureScope] = []
        self._overdue: Any = None  # a communicator that is revoked where a call is blocked for too long
        self._aborted: Any = None  # one that is revoked where the job ends
        self._is_aborting = False
        self._is_retired = False
        waiting.allow_waits()
        self._start()

    def _start(self) -> None:
        self._stopped = threading.Event()
        self._has_failed = self._is_retired
        self._thread = ServiceThread("mpisgd failure detector", self._serve)
        self._thread.start()

    def _serve(self) -> bool:
        """One round of the thread."""
        if self._fault_tolerance.wait_for_news(self._stopped, POLL_S):
            return False
        if self._aborted is not None and not self._is_aborting and self._aborted.is_revoked():
            # Each waits for the ranks behind it alone, or all would wait for each other.
            self._exit([*filter(is_stopped_or_gone, self._before), *self._behind], 0)
        lost = self._communicator.lost()  # MPI's messages move
        if not self._has_failed:
            self._has_failed = self._check(lost)
        if not self._is_retired:
            for scope in self.scopes:
                scope.look(lost)
        return True

    def _check(self, lost: Sequence[int]) -> bool:
        """Return whether there is a failure; every wait is ended then, but those in scopes."""
        is_revoked = self._communicator.is_revoked()
        # Asked last: the revocation that tells why the others are revoked comes before theirs.
        if self._overdue is not None and self._overdue.is_revoked():
            self._end_waits(CollectiveTimeout(self._fault_tolerance.overdue))
        elif lost or is_revoked:
            who = f"{ranks_text(lost)} of the job {'were' if len(lost) > 1 else 'was'} lost"
            found_out = "a rank of the job was lost, as another rank has found out"
            self._end_waits(PeerLost(f"{who}: killed, or out of reach" if lost else found_out))
        else:
            return False
        return True

    def enable_abort(self, processes: Sequence[ProcessIdentity], place: int) -> None:
        """Make `revoke` and `abort` possible. Collective over the communicator.

        Args:
            processes: of the ranks of this host, in their order.
            place: this rank's among them.
        """
        self._overdue = self._communicator.duplicate(apart=True)
        self._fault_tolerance.set_apart(self._overdue)
        self._before, self._behind = processes[:place], processes[place + 1 :]
        self._aborted = self._communicator.duplicate(apart=True)

    def abort(self, exit_code: int) -> NoReturn:
        """End all processes of the job; `exit_code` is the job's, unless a rank had to be killed.

        One that does not notice is killed: but where this world is left, it may be in the next one, and only
        those that are stopped are.
        """
        assert self._aborted is not None
        self._is_aborting = True
        self._aborted.revoke()
        others = [*self._before, *self._behind]
        self._exit([*filter(is_stopped_or_gone, others)] if self._is_retired else others, exit_code)

    def _exit(self, others: Sequence[ProcessIdentity], exit_code: int) -> NoReturn:
        """End this process when `others` have ended, or else these, too."""
        time.sleep(PROPAGATE_S)
        deadline_s = time.monotonic() + EXIT_S
        while others and time.monotonic() < deadline_s:
            time.sleep(EXIT_POLL_S)
            others = [process for process in others if not is_gone(process)]
        for process in others:
            with contextlib.suppress(OSError):
                os.kill(process.pid, signal.SIGKILL)
        os._exit(exit_code)

    def revoke(self, reason: str) -> None:
        """End every wait of the job, since one of this rank's has timed out inside MPI.

        Where a rank turns out to be lost, that is the reason.
        """
        if not self._check(self._communicator.lost()) and self._overdue is not None:
            self._overdue.revoke()
            self._end_waits(CollectiveTimeout(reason))

    def free(self) -> None:
        """Give the communicators back. Collective; after `stop`."""
        self._fault_tolerance.set_apart(None)
        if self._overdue is not None and self._aborted is not None:
            self._overdue.free()
            self._aborted.free()

    def retire(self) -> None:
        """Notice nothing but the abort of the job from now on: the failure is known."""
        self.stop()
        self._is_retired = True
        self._start()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join_from_others()

    def _end_waits(self, error: MpisgdError) -> None:
        """End every wait of this rank, and of those that share a communicator with it."""
        waiting.cancel_all(error)
        self._fault_tolerance.revoke_all()
        if not isinstance(error, PeerLost):
            for scope in self.scopes:
                scope.end(error)
