"""The heartbeats by which hosts tell each other that they live: a thread of ours lets MPI send them.

Open MPI sends them, and looks for those of others, only while somebody calls it, and a program may compute
for minutes. It has a thread of its own for that, which cannot be used. In 5.0 it beats before all ranks have
come so far in MPI_Init that they know what a heartbeat is, and these crash (in 4 of 240 starts). And MPI's
end waits for it for ever.
"""

import threading
from collections.abc import Callable

__all__ = ["start", "stop"]

PERIOD_S = 0.1  # of calling MPI, which looks at its clock at every eighth call at the latest
LAST_S = 2.0  # the last call takes microseconds

_over = threading.Event()
_thread: threading.Thread | None = None


def start(progress: Callable[[], None]) -> None:
    """Call `progress` a few times a second from now on, whatever the program does, until `stop`.

    It needs Python's lock for that: who holds it for longer than the hosts' patience is taken for dead.
    """
    global _thread
    if _thread is None:
        _over.clear()
        _thread = threading.Thread(target=_beat, args=(progress,), name="mpisgd heartbeat", daemon=True)
        _thread.start()


def stop() -> None:
    """Call it no more: MPI is about to end, and lets everyone know by itself."""
    global _thread
    if _thread is not None:
        _over.set()
        _thread.join(LAST_S)
        _thread = None


def _beat(progress: Callable[[], None]) -> None:
    while not _over.wait(PERIOD_S):
        progress()
