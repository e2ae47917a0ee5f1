"""Waiting for other ranks without burning a core and without waiting for ever.

A blocked MPI call spins at 100 % on every MPI we know and cannot be told to stop. Our own waits ask again
and again, give up the core in between, sleep once it takes long, and raise when the time limit is over.
"""

import os
import time
from collections.abc import Callable

__all__ = ["Patience", "set_crowded"]

SPIN_S = 0.0005  # most partners arrive within this
SHORT_SLEEP_S = 0.00005
LONG_SLEEP_S = 0.005  # a long wait costs about one per cent of a core


_crowded = True


def set_crowded(crowded: bool) -> None:
    """Say whether this host has more ranks than cores: then waiting ranks give up their core at once.

    Where every rank has a core, giving it up only lets strangers in for a time slice.
    """
    global _crowded
    _crowded = crowded


class Patience:
    """One wait: `wait_for(ready)` until it holds or `limit_s` seconds are over."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.started = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since this wait began."""
        return time.monotonic() - self.started

    def wait_for(self, ready: Callable[[], bool]) -> bool:
        """Return True once `ready()` does, False when the limit passed first."""
        while not ready():
            waited = self.waited_s
            if waited >= self.limit_s:
                return False
            if waited >= SPIN_S:
                time.sleep(self._pause())
            elif _crowded:
                os.sched_yield()
        return True

    def _pause(self) -> float:
        """Sleep a twentieth of what has been waited already: late partners are noticed that much later."""
        return min(LONG_SLEEP_S, max(SHORT_SLEEP_S, self.waited_s / 20))
