"""`InheritingThread`: a thread that belongs to the same job, and works on the same GPU, as whoever starts it.

Where ranks are threads of one process, a context variable says of which of them a thread is. Python's own
threads begin with an empty context (before Python 3.14).
"""

import contextvars
import threading
from typing import Any

from mpisgd.accelerator.runtime import runtime
from mpisgd.threads.scheduling import scheduler

__all__ = ["InheritingThread", "not_inherited"]

_not_inherited: list[contextvars.ContextVar[Any]] = []


def not_inherited(variable: contextvars.ContextVar[Any]) -> None:
    """Let a context variable be None in every thread that is started from now on."""
    _not_inherited.append(variable)


class InheritingThread(threading.Thread):
    """A thread that runs its target in a copy of the context that `start()` was called in."""

    def start(self) -> None:
        """Start it in this thread's context."""
        self._inherited = contextvars.copy_context()
        self._device = runtime().device_to_inherit()
        for variable in _not_inherited:
            self._inherited.run(variable.set, None)
        if (own := scheduler()) is None:
            super().start()
        else:
            own.start(self, super().start)

    def run(self) -> None:
        """Run the target."""
        runtime().inherit_device(self._device)
        self._inherited.run(super().run)
