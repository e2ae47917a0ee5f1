"""`PairwiseAveraging`: pairs of ranks average what they have, whenever one of them wants to; nobody waits.

Each rank has a copy x of its parameters, which changes while the program computes. A helper thread does the
exchanges on a communicator of its own:

    the rank that asks                           the rank that answers
    sends x[i] as it is, keeps that as s         receives s, sends x[j] as it is
    receives a, x[i] += (a - s) / 2              x[j] += (s - x[j]) / 2

A rank that asks has one exchange at a time and answers nobody, so each exchange is the mean of the two, and
what the program has added to x[i] meanwhile stays: the sum over the ranks never changes by an exchange.

The end is collective. Ranks that ask finish what they have begun and come to a barrier, which does not block;
ranks that answer come to it at once, and go on answering until it is over.
"""

import math
import threading
from collections.abc import Callable
from random import Random

from mpisgd.errors import CollectiveTimeout, NotInitialized
from mpisgd.event_log import Entry, EventLog, Place
from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.methods.gossip.ad_psgd.bipartite import Roles
from mpisgd.methods.strategy.flat_copy import FlatCopy
from mpisgd.threads import wait_registry
from mpisgd.threads.scheduling import join, now_s, sleep, wait_for_event
from mpisgd.threads.service_thread import InheritingThread
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff

__all__ = ["PairwiseAveraging"]

ASK_TAG, ANSWER_TAG = 1, 2
PARTS = ("ask", "answer", "take")  # of an exchange, as they are recorded
SHORT_SLEEP_S, LONG_SLEEP_S = 0.0001, 0.005
SHARE = 1 / 20  # a pause is this share of how long nothing has happened


class PairwiseAveraging:
    """One rank's copy of the parameters, and the thread that averages it with those of other ranks.

    Args:
        communicator: of its own; freed by `finish`.
        roles: who asks whom.
        start: what x is at first; what comes in lies as it does.
        events: has what happens to x; None: that is not recorded.

    Attributes:
        x: the copy; `lock` before use.
        lock: held while `x` is used.
        num_exchanges: how many exchanges this rank has asked for that are over.
    """

    def __init__(
        self,
        communicator: GroupCommunicator,
        roles: Roles,
        start: FlatCopy,
        events: EventLog | None = None,
    ) -> None:
        self.x = start
        self.lock = threading.Lock()
        self.num_exchanges = 0
        self._communicator = communicator
        self._events = events
        self._finishing = False
        self._error: Exception | None = None
        self._changed = threading.Event()  # something is wanted
        self._ended = threading.Event()
        rank = communicator.rank
        role = _Asking if roles.asks[rank] else _Answering
        self._role = role(self, communicator, roles.partners[rank])
        self._thread = InheritingThread(target=self._run, name="mpisgd gossip", daemon=True)
        self._thread.start()

    def want_exchange(self) -> None:
        """Ask a partner as soon as the last exchange is over; return at once.

        Raises:
            Exception: the helper thread has ended by it.
            NotInitialized: `finish` has ended the exchanges.
        """
        if self._error is not None:
            raise self._error
        if self._finishing:
            raise NotInitialized("Gossip: its exchanges were ended by mpisgd.shutdown()")
        self._role.wants = True
        self._changed.set()

    def _run(self) -> None:
        """The thread: exchange until all ranks have finished, or one is lost."""
        wait_registry.workers[threading.get_ident()] = lambda: False  # nobody's operation waits for it
        try:
            while not self._role.is_over():
                self._role.advance(self._finishing)
        except Exception as exc:  # whatever it is: without this thread the ranks would drift apart in silence
            self._error = exc
            self._role.abandon()
        finally:
            del wait_registry.workers[threading.get_ident()]
            self._ended.set()

    def record(self, what: str, asks: int, answers: int) -> None:
        """Record a part of an exchange, where that is wanted; `lock` is held, as for what it is of."""
        if self._events is not None:
            exchanges = f"rank {asks} asks rank {answers}"
            number = len(PARTS) * self._events.count(f"{what}: {exchanges}") + PARTS.index(what)
            self._events.add(Entry(what, (asks, answers), place=Place(exchanges, number)))

    def wait_for_change(self) -> None:
        """Sleep until something is wanted."""
        wait_for_event(self._changed, math.inf)
        self._changed.clear()

    def finish(self, timeout_s: float) -> None:
        """Return when no exchange is under way on any rank, and free the communicator. Collective.

        Raises:
            CollectiveTimeout: another rank did not come.
            Exception: the helper thread has ended by it.
        """
        self.abandon()
        backoff = Backoff(timeout_s)
        reason = WaitReason("the end of the exchanges of Gossip", is_local=True)
        if not backoff.wait_for(self._ended.is_set, about=lambda: reason):
            raise CollectiveTimeout(
                f"Gossip: waited {backoff.waited_s:.1f} s for the other ranks to end their exchanges"
            )
        join(self._thread, None)
        if self._error is not None:
            raise self._error
        self._communicator.free()

    def abandon(self) -> None:
        """Let the thread end: once all ranks do, or as its communicator is revoked."""
        self._finishing = True
        self._changed.set()


class _Role:
    """What a helper thread does. It alone calls these methods.

    Attributes:
        wants: whether an exchange is to begin; set by any thread.
    """

    def __init__(
        self, averaging: PairwiseAveraging, communicator: GroupCommunicator, partners: tuple[int, ...]
    ) -> None:
        self.wants = False
        self._averaging = averaging
        self._communicator = communicator
        self._partners = partners
        self._theirs, self._mine = averaging.x.new_like(), averaging.x.new_like()
        self._in_flight: list[Request] = []
        self._barrier: Request | None = None
        self._is_over = False

    def advance(self, finishing: bool) -> None:
        """Go on with what is under way; sleep a little where nothing is to be done."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Return whether all ranks have finished."""
        return self._is_over

    def abandon(self) -> None:
        """Keep the memory of what is in flight, to which MPI may still write."""
        self._communicator.abandon(self._in_flight, (self._mine, self._theirs))

    def _all_have_finished(self) -> bool:
        """Return whether all ranks have come to the barrier, which begins with the first call."""
        if self._barrier is None:
            self._barrier = self._communicator.barrier_request()
        return self._communicator.poll([self._barrier])


class _Asking(_Role):
    """Sends x to a partner, and takes the mean with what comes back."""

    def __init__(
        self, averaging: PairwiseAveraging, communicator: GroupCommunicator, partners: tuple[int, ...]
    ) -> None:
        super().__init__(averaging, communicator, partners)
        self._chance = Random(communicator.rank)

    def advance(self, finishing: bool) -> None:
        """Do one exchange if it is wanted, else sleep until one is."""
        if finishing:
            _poll(self._all_have_finished)
            self._is_over = True
        elif self.wants:
            self.wants = False
            self._exchange(self._chance.choice(self._partners))
        else:
            self._averaging.wait_for_change()

    def _exchange(self, partner: int) -> None:
        averaging, communicator = self._averaging, self._communicator
        with averaging.lock:
            self._mine.copy_(averaging.x)
            averaging.record("ask", communicator.rank, partner)
        self._in_flight = [
            communicator.irecv(self._theirs.memory, partner, ANSWER_TAG),
            communicator.isend(self._mine.memory, partner, ASK_TAG),
        ]
        _poll(lambda: communicator.poll(self._in_flight))
        with averaging.lock:
            averaging.x.add_difference_(self._theirs, self._mine, 0.5)
            averaging.record("take", communicator.rank, partner)
        averaging.num_exchanges += 1


class _Answering(_Role):
    """Sends x back to whoever asks, and takes the mean with what has come."""

    def __init__(
        self, averaging: PairwiseAveraging, communicator: GroupCommunicator, partners: tuple[int, ...]
    ) -> None:
        super().__init__(averaging, communicator, partners)
        self._answers = False  # whether an answer is in flight; else a question is waited for
        self._last_s = now_s()
        self._wait_for_question()

    def _wait_for_question(self) -> None:
        self._answers = False
        self._in_flight = [self._communicator.irecv(self._theirs.memory, None, ASK_TAG)]

    def advance(self, finishing: bool) -> None:
        """Answer if somebody has asked; end if all ranks have finished, so that nobody will."""
        come = self._communicator.poll_one(self._in_flight[0])
        if come is not None:
            self._last_s = now_s()
            self._wait_for_question() if self._answers else self._answer(come[0])
        elif finishing and not self._answers and self._all_have_finished():
            self._communicator.cancel(self._in_flight[0], self._theirs)
            self._is_over = True
        else:
            _pause(now_s() - self._last_s)

    def _answer(self, partner: int) -> None:
        x = self._averaging.x
        with self._averaging.lock:
            self._mine.copy_(x)
            x.add_difference_(self._theirs, self._mine, 0.5)
            self._averaging.record("answer", partner, self._communicator.rank)
        self._answers = True
        self._in_flight = [self._communicator.isend(self._mine.memory, partner, ANSWER_TAG)]


def _poll(ready: Callable[[], bool]) -> None:
    """Wait, for as long as it takes: what ends it otherwise is the error that tells of a lost rank."""
    started_s = now_s()
    while not ready():
        _pause(now_s() - started_s)


def _pause(waited_s: float) -> None:
    sleep(min(LONG_SLEEP_S, max(SHORT_SLEEP_S, waited_s * SHARE)))
