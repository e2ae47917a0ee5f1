"""`ServiceThread`: a thread of ours that serves others. An error in it is printed once, and it goes on.

Whoever is served would wait for ever if it ended: for a message, a report of a stall, the news of a loss.
"""

import threading
import traceback
from collections.abc import Callable

from mpisgd.standard_error import print_to_user
from mpisgd.threads.inheriting_thread import InheritingThread
from mpisgd.threads.scheduling import join, sleep

__all__ = ["ServiceThread"]

PAUSE_S = 0.1  # after an error, which may come again at once


class ServiceThread(InheritingThread):
    """The thread; a daemon.

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
