"""The MPI library: its start, and what it can do."""

import threading

from mpi4py import MPI

from mpisgd import config
from mpisgd.errors import MpiFailed
from mpisgd.transport.mpi.calls import OVERDUE, set_apart, take_turns
from mpisgd.transport.mpi.communicator import Communicator, free_abandoned, revoke_all

__all__ = [
    "MpiFaultTolerance",
    "library_version",
    "parent",
    "progress",
    "start",
    "survives_losses",
    "thread_level",
]

THREAD_LEVELS = {
    MPI.THREAD_SINGLE: "SINGLE",
    MPI.THREAD_FUNNELED: "FUNNELED",
    MPI.THREAD_SERIALIZED: "SERIALIZED",
    MPI.THREAD_MULTIPLE: "MULTIPLE",
}


def start() -> bool:
    """Start MPI unless it runs already; return whether this call (or this import) started it."""
    if MPI.Is_finalized():
        raise MpiFailed("MPI is already finalized in this process: it cannot be started a second time")
    starts = not MPI.Is_initialized()
    if starts:
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    if MPI.Query_thread() == MPI.THREAD_SERIALIZED:
        take_turns()
    return starts


def survives_losses() -> bool:
    """Return whether this job outlives the loss of a rank: an MPI that can, started so that it does."""
    try:
        MPI.COMM_SELF.Get_failed().Free()
    except (AttributeError, NotImplementedError, MPI.Exception):
        return False
    return not library_version().startswith("Open MPI") or config.fault_tolerance()


def progress() -> None:
    """Let MPI do what is to be done, messages and heartbeats; nothing where it has ended."""
    if not MPI.Is_finalized():
        MPI.COMM_SELF.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)


def parent() -> "Communicator | None":
    """Return an intercommunicator to the ranks that spawned this process; None where `mpirun` started it."""
    comm = MPI.Comm.Get_parent()
    return None if comm == MPI.COMM_NULL else Communicator(comm)


def library_version() -> str:
    """Return the first line of what the MPI library calls itself."""
    return MPI.Get_library_version().splitlines()[0].strip().rstrip("\0")


def thread_level() -> str:
    """Return the thread level MPI runs at: SINGLE, FUNNELED, SERIALIZED or MULTIPLE."""
    return THREAD_LEVELS[MPI.Query_thread()]


class MpiFaultTolerance:
    """What the failure detector asks of an MPI that outlives lost ranks; see its `FaultTolerance`."""

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
