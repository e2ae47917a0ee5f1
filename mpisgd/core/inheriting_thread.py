"""`InheritingThread`: a thread that belongs to the same job as whoever starts it.

Where ranks are threads of one process, a context variable says of which of them a thread is. Python's own
threads begin with an empty context (before Python 3.14).
"""

import contextvars
import threading

from mpisgd.core.owner import without_owner
from mpisgd.core.scheduling import scheduler

__all__ = ["InheritingThread"]


class InheritingThread(threading.Thread):
    """A thread that runs its target in a copy of the context that `start()` was called in.

    Operations that it begins belong to no optimizer, whatever its starter was doing: which rank comes to
    start a thread, and when, differs.
    """

    def start(self) -> None:
        """Start it in this thread's context."""
        self._inherited = without_owner(contextvars.copy_context())
        if (own := scheduler()) is None:
            super().start()
        else:
            own.start(self, super().start)

    def run(self) -> None:
        """Run the target."""
        self._inherited.run(super().run)
