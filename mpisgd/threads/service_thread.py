"""Threads of ours: `InheritingThread` belongs to a job, `ServiceThread` serves others in rounds."""

import contextvars
import threading
import traceback
from collections.abc import Callable
from typing import Any

from mpisgd.accelerator.runtime import runtime
from mpisgd.standard_error import print_to_user
from mpisgd.threads.scheduling import join, scheduler, sleep

__all__ = ["InheritingThread", "ServiceThread", "not_inherited"]


PAUSE_S = 0.1  # after an error, which may come again at once

_not_inherited: list[contextvars.ContextVar[Any]] = []


def not_inherited(variable: contextvars.ContextVar[Any]) -> None:
    """Let a context variable be None in every thread that is started from now on."""
    _not_inherited.append(variable)


class InheritingThread(threading.Thread):
    """A thread that belongs to the same job, and works on the same GPU, as whoever starts it.

    Where ranks are threads of one process, a context variable says of which of them a thread is. Python's own
    threads begin with an empty context (before Python 3.14). This one runs its target in a copy of the
    context that `start()` was called in.
    """

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


class ServiceThread(InheritingThread):
    """A daemon that serves others. An error in it is printed once, and it goes on.

    Whoever is served would wait for ever if it ended: for a message, a report of a stall, the news of a loss.

    Args:
        name: of the thread.
        serve: one round of its work, which may block; returns whether another round follows.
        what: it is, for the message about an error; default its name.
    """

    def __init__(self, name: str, serve: Callable[[], bool], *, what: str = "") -> None:
        super().__init__(target=self._serve_rounds, name=name, daemon=True)
        self._serve = serve
        self._what = what or f"the thread '{name}'"
        self._has_failed = False

    def _serve_rounds(self) -> None:
        """Serve round after round until there is no more to do."""
        while self._goes_on():
            pass

    def _goes_on(self) -> bool:
        try:
            return self._serve()
        except Exception:
            if not self._has_failed:
                self._has_failed = True
                print_to_user(f"{self._what} has failed, and tries again:\n{traceback.format_exc().rstrip()}")
            sleep(PAUSE_S)
            return True

    def join_from_others(self, timeout_s: float | None = None) -> None:
        """Wait for the end of the thread; at once where it is this thread itself."""
        if self is not threading.current_thread():
            join(self, timeout_s)
