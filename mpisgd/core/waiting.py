"""Waiting for other ranks without burning a core and without waiting for ever.

A blocked MPI call spins at 100 % on every MPI we know and cannot be told to stop. Our own waits ask again
and again, give up the core in between, sleep once it takes long (where the one they wait for can wake them,
at once if cores are scarce), and raise when the time limit is over.
"""

import os
import time
from collections.abc import Callable

from mpisgd.core import wait_registry
from mpisgd.core.wait_registry import WaitReason
from mpisgd.errors import MpisgdError, PeerLost

__all__ = [
    "Backoff",
    "cancel_reason",
    "give_up",
    "is_loss",
    "is_oversubscribed",
    "message_begins",
    "message_ends",
    "set_oversubscribed",
    "take_back",
]

SPIN_S = 0.0005  # most partners arrive within this
SHORT_SLEEP_S = 0.00005
NOTE_S = 0.1  # who waits longer says so, for those who ask
LONG_SLEEP_S = 0.005  # a long wait costs about one per cent of a core
# Where cores are scarce, giving up the core is quicker than being woken for this long (4 ranks on 2 cores: a
# barrier took 8 us, by sleeping at once 34 us).
YIELD_S = 0.0003
# One who will be woken sleeps longer; it wakes by itself to move MPI's messages along.
NAP_S = 0.0002
# Pauses are this share of what has been waited already: late partners are noticed that much later.
SHARE = 1 / 20
# The same while messages are under way. Where a rank cannot read another's memory, MPI cuts large ones into
# pieces, and each time both sides ask only a few move on: 16 MiB took 950 ms with the share above, 25 ms with
# this one. A wait of 2 s then costs 4 % of a core, a longer one less.
MESSAGE_SHARE = 1 / 1000


_oversubscribed = True
_messages: set[int] = set()
_cancelled_by: MpisgdError | None = None


def give_up(error: MpisgdError) -> None:
    """Let every wait of this process raise `error`, now and from now on: whom it is for will not come.

    The first reason stays until `take_back()`: what comes after it comes of it.
    """
    global _cancelled_by
    _cancelled_by = _cancelled_by or error


def take_back() -> None:
    """Let waits be waits again."""
    global _cancelled_by
    _cancelled_by = None


def cancel_reason() -> MpisgdError | None:
    """Return why there is no sense in waiting for other ranks, to be raised; None while there is."""
    error = _cancelled_by  # each thread raises one of its own: a traceback grows wherever it is raised
    return None if error is None else type(error)(str(error))


def is_loss() -> bool:
    """Return whether that is the loss of a rank, which the others outlive."""
    return isinstance(_cancelled_by, PeerLost)


def set_oversubscribed(crowded: bool) -> None:
    """Say whether this host has more ranks than cores: then waiting ranks give up their core at once.

    Where every rank has a core, giving it up only lets strangers in for a time slice.
    """
    global _oversubscribed
    _oversubscribed = crowded


def is_oversubscribed() -> bool:
    """Return whether this host has more ranks than cores, as far as is known."""
    return _oversubscribed


def message_begins(message: object) -> None:
    """Let all waits move messages along until this one has ended: another rank may be waiting for it."""
    _messages.add(id(message))


def message_ends(message: object) -> None:
    """Take back `message_begins`."""
    _messages.discard(id(message))


class Backoff:
    """One wait: `wait_for(ready)` until it holds or `limit_s` seconds are over.

    Attributes:
        verdict: who was missing when they were over, as far as these could tell.
        quiet: whether to have nobody told of it, since it goes on.
    """

    def __init__(self, limit_s: float, *, quiet: bool = False) -> None:
        self.limit_s = limit_s
        self.quiet = quiet
        self.verdict = ""
        self.started = time.monotonic()

    @property
    def waited_s(self) -> float:
        """Seconds since this wait began."""
        return time.monotonic() - self.started

    def wait_for(
        self,
        ready: Callable[[], bool],
        doze: Callable[[float], bool] | None = None,
        about: Callable[[], WaitReason] | None = None,
    ) -> bool:
        """Return True once `ready()` does, False when the limit passed first.

        Args:
            ready: asked again and again.
            doze: sleeps for so many seconds unless woken, and returns True; False where nobody would wake
                it. Used when cores are scarce.
            about: tells those who ask what this wait is for, where the queue's operation does not.

        Raises:
            PeerLost: a rank of the job is gone, or whatever else was given to `give_up`.
        """
        noted = False
        try:
            while not ready():
                if _cancelled_by is not None and (futile := cancel_reason()) is not None:
                    raise futile
                waited = self.waited_s
                if waited >= self.limit_s:
                    if noted and not self.quiet:
                        self.verdict = wait_registry.report_timeout()
                    return False
                if waited >= NOTE_S:
                    if not noted:
                        wait_registry.register(self, self.started, self.limit_s, about)
                        noted = True
                    if (error := wait_registry.cancel_error(self.started)) is not None:
                        raise error
                if _oversubscribed and waited >= YIELD_S and doze is not None and doze(_pause(waited, NAP_S)):
                    continue
                if waited >= SPIN_S:
                    time.sleep(_pause(waited, SHORT_SLEEP_S))
                elif _oversubscribed:
                    os.sched_yield()
            return True
        finally:
            if noted:
                wait_registry.unregister(self)


def _pause(waited_s: float, shortest_s: float) -> float:
    return min(LONG_SLEEP_S, max(shortest_s, waited_s * (MESSAGE_SHARE if _messages else SHARE)))
