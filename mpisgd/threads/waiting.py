"""Waiting for other ranks without burning a core and without waiting for ever.

A blocked MPI call spins at 100 % on every MPI we know and cannot be told to stop. Our own waits poll, yield
the core in between, sleep once it takes long (where the rank they wait for can wake them, at once if cores
are scarce), and raise at their timeout.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from mpisgd.errors import MpisgdError, PeerLost, afresh
from mpisgd.threads import scheduling, wait_registry
from mpisgd.threads.scheduling import Cancellation
from mpisgd.threads.wait_registry import WaitReason

__all__ = [
    "BUSY_S",
    "SHORT_YIELD_S",
    "YIELD_S",
    "Backoff",
    "add_pending_message",
    "allow_waits",
    "cancel_all",
    "cancel_reason",
    "cancelled_by",
    "cancelled_by_loss",
    "is_oversubscribed",
    "pause_s",
    "remove_pending_message",
    "set_oversubscribed",
]

# Most arrive within this. A rank that sleeps computes slower afterwards: a step of 69 ms took 88 on 2 cores.
SPIN_S = REGISTER_S = 0.1  # a longer wait is registered, for the monitor
SHORT_SPIN_S = 0.0005  # where cores are scarce, or the main thread computes meanwhile
SHORT_SLEEP_S = 0.00005
LONG_SLEEP_S = 0.005  # a long wait costs about one per cent of a core
# Where cores are scarce, yielding the core is quicker than being woken for this long (4 ranks on 2 cores: a
# barrier took 8 us, by sleeping at once 34 us).
YIELD_S = 0.0003
SHORT_YIELD_S = 0.00015  # the same where others exchange messages meanwhile, which takes longer
BUSY_S = 0.00002  # for so long a rank that has a core keeps it
# A rank that will be woken sleeps longer: each look takes time of a core that others need. It wakes by itself
# to move MPI's messages along, sooner where some are in flight.
WAKEABLE_SLEEP_S = 0.002
WAKEABLE_MESSAGE_SLEEP_S = 0.0002
# Pauses are this share of what has been waited already: late partners are noticed that much later.
SHARE = 1 / 20
# The same while messages are in flight. Where a rank cannot read another's memory, MPI cuts large ones into
# pieces, and each time both sides ask only a few move on: 16 MiB took 950 ms with the share above, now 25 ms.
MESSAGE_SHARE = 1 / 1000

_main_thread = threading.main_thread().ident
_oversubscribed = True
_pending_messages: set[int] = set()
_of_process = Cancellation()


class _OfThread(threading.local):
    cancellation: Cancellation | None = None


_of_thread = _OfThread()


@contextlib.contextmanager
def cancelled_by(cancellation: Cancellation) -> Iterator[None]:
    """Let this cancellation alone end the waits of this thread meanwhile; `cancel_all` ends none of them."""
    before, _of_thread.cancellation = _of_thread.cancellation, cancellation
    try:
        yield
    finally:
        _of_thread.cancellation = before


def _cancellation() -> Cancellation:
    """Return that of this process, or of this thread's rank where the ranks are threads of one process."""
    return _of_process if (own := scheduling.scheduler()) is None else own.cancellation()


def cancel_all(error: MpisgdError) -> None:
    """Let every wait of this rank raise `error`, now and from now on.

    The first reason stays until `allow_waits()`: later errors follow from it.
    """
    cancellation = _cancellation()
    cancellation.error = cancellation.error or error


def allow_waits() -> None:
    """Undo `cancel_all`."""
    _cancellation().error = None


def cancel_reason() -> MpisgdError | None:
    """Return why all waits are cancelled, to be raised; None where they are not."""
    return _to_raise(_cancellation())


def _to_raise(cancellation: Cancellation) -> MpisgdError | None:
    error = cancellation.error
    return None if error is None else afresh(error)


def cancelled_by_loss() -> bool:
    """Return whether all waits are cancelled since a rank was lost, which the others outlive."""
    return isinstance(_cancellation().error, PeerLost)


def set_oversubscribed(oversubscribed: bool) -> None:
    """Say whether this host has more ranks than cores: then waiting ranks yield their core at once."""
    global _oversubscribed
    _oversubscribed = oversubscribed


def is_oversubscribed() -> bool:
    """Return whether this host has more ranks than cores, as far as is known."""
    return _oversubscribed


def add_pending_message(message: object) -> None:
    """Let all waits poll often until this message has ended: another rank may be waiting for it."""
    if scheduling.scheduler() is None:  # else nobody pauses
        _pending_messages.add(id(message))


def remove_pending_message(message: object) -> None:
    """Undo `add_pending_message`."""
    _pending_messages.discard(id(message))


class Backoff:
    """One wait: `wait_for(ready)` until it holds or `limit_s` seconds are over.

    Attributes:
        missing: which ranks were missing at the timeout, as far as they could tell.
        quiet: whether the timeout is not reported, since the caller goes on.
        own_limit: whether the limit is that of this call alone: no deadlock, as the program may go on then.
    """

    def __init__(self, limit_s: float, *, quiet: bool = False, own_limit: bool = False) -> None:
        self.limit_s = limit_s
        self.quiet = quiet
        self.own_limit = (quiet or own_limit) and limit_s != wait_registry.NO_TIMEOUT_S
        self.missing = ""
        self.started = scheduling.now_s()

    @property
    def waited_s(self) -> float:
        """Seconds since this wait began."""
        return scheduling.now_s() - self.started

    def wait_for(
        self,
        ready: Callable[[], bool],
        sleep: Callable[[float], bool] | None = None,
        about: Callable[[], WaitReason] | None = None,
        *,
        yield_s: float = YIELD_S,
    ) -> bool:
        """Return True once `ready()` does, False when the limit passed first.

        Args:
            ready: polled.
            sleep: sleeps for so many seconds unless woken, and returns True; False at once where no rank
                would wake it. Used when cores are scarce.
            about: tells the monitor what this wait is for, where the queue's operation does not.
            yield_s: for so long it only yields the core, before it sleeps that way.

        Raises:
            PeerLost: a rank of the job was lost; or whatever else was given to `cancel_all`, or to the
                cancellation of `cancelled_by`.
        """
        if (own := scheduling.scheduler()) is not None:
            return self._wait_in_turn(own, ready)
        noted, cancellation = False, _of_thread.cancellation or _of_process
        in_background = threading.get_ident() != _main_thread
        spin_s = SHORT_SPIN_S if _oversubscribed or in_background else SPIN_S
        try:
            while not ready():
                if cancellation.error is not None and (reason := _to_raise(cancellation)) is not None:
                    raise reason
                waited = time.monotonic() - self.started
                if waited >= self.limit_s:
                    if noted and not self.quiet:
                        self.missing = wait_registry.report_timeout()
                    return False
                if waited >= REGISTER_S:
                    if not noted:
                        wait_registry.register(
                            self, self.started, self.limit_s, about, own_limit=self.own_limit
                        )
                        noted = True
                    if (error := wait_registry.cancel_error(self.started)) is not None:
                        raise error
                wakeable = _oversubscribed and waited >= yield_s and sleep is not None
                if wakeable and sleep is not None:
                    shortest_s = WAKEABLE_MESSAGE_SLEEP_S if _pending_messages else WAKEABLE_SLEEP_S
                    if sleep(pause_s(waited, shortest_s)):
                        continue
                if waited >= spin_s:
                    time.sleep(pause_s(waited))
                elif _oversubscribed or waited >= BUSY_S:
                    os.sched_yield()
            return True
        finally:
            if noted:
                wait_registry.unregister(self)

    def _wait_in_turn(self, own: scheduling.Scheduler, ready: Callable[[], bool]) -> bool:
        """Do the same where a scheduler decides who runs, which asks whether this wait is over."""
        cancellation = _of_thread.cancellation or own.cancellation()

        def is_over() -> bool:
            if ready():
                return True
            if (reason := _to_raise(cancellation)) is not None:
                raise reason
            return False

        return own.wait(is_over, self.limit_s - self.waited_s)


def pause_s(waited_s: float, shortest_s: float = SHORT_SLEEP_S) -> float:
    """Return how long to sleep between two polls, after so long a wait."""
    return min(LONG_SLEEP_S, max(shortest_s, waited_s * (MESSAGE_SHARE if _pending_messages else SHARE)))
