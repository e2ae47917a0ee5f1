"""`MpiFaultTolerance`: what the failure detector asks of an MPI that outlives lost ranks (ULFM)."""

import threading
from typing import TYPE_CHECKING

from mpisgd.transport.mpi.calls import OVERDUE, set_apart
from mpisgd.transport.mpi.communicator import free_abandoned, revoke_all

if TYPE_CHECKING:
    from mpisgd.transport.mpi.communicator import Communicator

__all__ = ["MpiFaultTolerance"]


class MpiFaultTolerance:
    """Of this process; see `mpisgd.monitor.failure_detector.FaultTolerance`."""

    overdue = OVERDUE

    def wait_for_news(self, stopped: threading.Event, limit_s: float) -> bool:
        """Wait until the next look at MPI; return whether the detector has been stopped."""
        return stopped.wait(limit_s)

    def revoke_all(self) -> None:
        """End whatever goes on over any communicator of this process, on all ranks that it reaches."""
        revoke_all()

    def set_apart(self, communicator: "Communicator | None") -> None:
        """Let this communicator tell why others are revoked; see `mpisgd.transport.mpi.calls.set_apart`."""
        set_apart(communicator)

    def free_abandoned(self) -> None:
        """Free the memory of abandoned requests, as far as MPI is done with it."""
        free_abandoned()
