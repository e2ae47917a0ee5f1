"""The heartbeats by which hosts detect that another one is dead: their period, their timeout, and the thread.

Open MPI sends them, and checks for those of others, only while it is called, and a program may compute for
minutes. So a thread of ours calls it. Open MPI has one of its own for that, which cannot be used: in 5.0 it
beats before all ranks have come so far in MPI_Init that they know what a heartbeat is, and these crash (in 4
of 240 starts); and MPI's end waits for it for ever.
"""

import functools
import os
import threading
from collections.abc import Callable, Mapping

from mpisgd import config
from mpisgd.threads.service_thread import ServiceThread

__all__ = ["is_enabled", "settings", "start", "stop"]

PERIOD_S = 1.0
TIMEOUT_S = 10.0  # a host whose heartbeat has not come for so long is lost
CALL_S = 0.1  # between two calls of MPI, which reads its clock at every eighth call at the latest
LAST_CALL_S = 2.0  # the last one takes microseconds

# A rank that detects a loss tells the others, who could not agree on what to do otherwise.
SETTINGS = {
    "OMPI_MCA_mpi_ft_detector": "1",
    "OMPI_MCA_mpi_ft_detector_period": f"{PERIOD_S:g}",
    "OMPI_MCA_mpi_ft_detector_timeout": f"{TIMEOUT_S:g}",
    "OMPI_MCA_mpi_ft_propagator_with_rbcast": "1",
}

_stopped = threading.Event()
_thread: ServiceThread | None = None


def settings(env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the settings of Open MPI for heartbeats, where losses are survived and there are several hosts.

    Those that the user has chosen are left out.
    """
    one_host = config.launcher_local_size(env) == config.launcher_size(env)
    if not config.fault_tolerance(env) or one_host:
        return {}
    return {name: value for name, value in SETTINGS.items() if name not in env}


def is_enabled(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI was told to detect dead hosts by their missing heartbeats."""
    wanted = env.get("OMPI_MCA_mpi_ft_detector", "").lower() in ("1", "true", "yes")
    return wanted and config.fault_tolerance(env)


def start(progress: Callable[[], None]) -> None:
    """Call `progress` a few times a second from now on, whatever the program does, until `stop`.

    It needs Python's lock for that: a process that holds it for longer than the timeout is taken for dead.
    """
    global _thread
    if _thread is None:
        _stopped.clear()
        _thread = ServiceThread("mpisgd heartbeat", functools.partial(_beat, progress))
        _thread.start()


def stop() -> None:
    """Call it no more: MPI is about to end, and lets every host know by itself."""
    global _thread
    if _thread is not None:
        _stopped.set()
        _thread.join(LAST_CALL_S)
        _thread = None


def _beat(progress: Callable[[], None]) -> bool:
    """One round of the thread."""
    if _stopped.wait(CALL_S):
        return False
    progress()
    return True
