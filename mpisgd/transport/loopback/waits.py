"""`Waits`: which of the waits of all threads may be over, so that not all are asked again and again.

What a wait depends on nobody says: on shared memory, say, which a thread of the same host has written. So
those of a host are asked again after a thread of it has run; those of other hosts only after a message or
something else of the network has come for their rank. Among the waits that may be over one after the other is
drawn and asked, until one is.
"""

import heapq
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from mpisgd.transport.loopback.draws import Draws

__all__ = ["NOWHERE", "Place", "Task", "Waits"]

FOREVER = float("inf")
# To ask whether a wait is over may move things along, for that wait and for others that were asked before:
# those that were asked in vain are asked so often before time goes on.
ROUNDS = 3


class Place(NamedTuple):
    """Where a thread runs: the rank of the job at its start, and the number of its host."""

    rank: int
    host: int


NOWHERE = Place(-1, -1)


class Task:
    """One thread, and its wait.

    Attributes:
        thread: it.
        place: where it runs.
        baton: released by whoever hands over to it.
        timed_out: whether its wait was over by its limit.
        error: what its wait ends with.
    """

    def __init__(self, thread: threading.Thread, place: Place) -> None:
        self.thread = thread
        self.place = place
        self.baton = threading.Lock()  # a semaphore of Python's is slower
        self.baton.acquire()
        self.timed_out = False
        self.error: BaseException | None = None
        self.ready: Callable[[], bool] = _always
        self.deadline_s = FOREVER
        self.at = -1  # its place among those that may be over, -1 for none
        self.turn = 0  # when it ran last
        self.wait_number = 0

    def begin(self, ready: Callable[[], bool], deadline_s: float) -> None:
        """Begin to wait."""
        self.ready, self.deadline_s = ready, deadline_s
        self.timed_out, self.error = False, None
        self.wait_number += 1

    def is_over(self, now_s: float) -> bool:
        """Return whether the wait is over."""
        try:
            if self.error is not None or self.ready():
                return True
        except BaseException as exc:  # of that thread's wait
            self.error = exc
            return True
        self.timed_out = now_s >= self.deadline_s
        return self.timed_out


class _Limit(NamedTuple):
    at_s: float
    number: int
    task: Task
    wait_number: int


class Waits:
    """The waits of all threads but the one that runs.

    Args:
        draws: which one is asked next.

    Attributes:
        asked: the one whose wait is asked right now, by another thread.
    """

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._maybe: list[Task] = []  # these may be over
        self._in_vain: dict[Task, None] = {}  # these were asked since time went on, and are not
        self._round = 1
        self._of_host: defaultdict[int, dict[Task, None]] = defaultdict(dict)
        self._of_rank: defaultdict[int, dict[Task, None]] = defaultdict(dict)
        self._limits: list[_Limit] = []
        self._turns = itertools.count(1)
        self._all_asked = False
        self.asked: Task | None = None

    def add(self, task: Task) -> None:
        """Add a thread that may run."""
        self._of_host[task.place.host][task] = None
        self._of_rank[task.place.rank][task] = None
        self._may_be_over(task)

    def remove(self, task: Task) -> None:
        """Remove a thread that runs no more."""
        del self._of_host[task.place.host][task], self._of_rank[task.place.rank][task]
        self._take(task)
        self._in_vain.pop(task, None)
        self._has_run(task)

    def has_begun(self, task: Task) -> None:
        """Note that a thread has run, and waits now."""
        if task.deadline_s < FOREVER:
            limit = _Limit(task.deadline_s, next(self._turns), task, task.wait_number)
            heapq.heappush(self._limits, limit)
        self._has_run(task)

    def _has_run(self, task: Task) -> None:
        self._all_asked = False
        for other in self._of_host[task.place.host]:
            if other.at < 0:
                self._may_be_over(other)

    def concern(self, rank: int) -> None:
        """Note that waits of a rank may be over."""
        self._all_asked = False
        for task in self._of_rank[rank]:
            if task.at < 0:
                self._may_be_over(task)

    def fail(self, task: Task, error: BaseException) -> None:
        """Let a wait end with an error."""
        task.error = error
        if task.at < 0:
            self._may_be_over(task)

    def _may_be_over(self, task: Task) -> None:
        task.at = len(self._maybe)
        self._maybe.append(task)

    def _take(self, task: Task) -> None:
        if task.at >= 0:
            last = self._maybe.pop()
            if last is not task:
                self._maybe[task.at] = last
                last.at = task.at
            task.at = -1

    # -- asking -----------------------------------------------------------------------------------------

    def next_over(self, now_s: float) -> Task | None:
        """Return a thread whose wait is over, which is to run; None where none is."""
        maybe = self._maybe
        while maybe or self._ask_again():
            if self._draws.are_over:
                task = min(maybe, key=lambda task: task.turn)  # who has waited longest
            else:
                task = maybe[self._draws.index(len(maybe))]
            self._take(task)
            self.asked = task
            is_over = task.is_over(now_s)
            self.asked = None
            if is_over:
                self._round = 1
                self._in_vain.pop(task, None)
                task.turn = next(self._turns)
                return task
            self._in_vain[task] = None
        self._in_vain.clear()
        self._round = 1
        return None

    def _ask_again(self) -> bool:
        """Return whether those that were asked in vain are asked once more."""
        if self._round == ROUNDS or not self._in_vain:
            return False
        self._round += 1
        for task in self._in_vain:
            self._may_be_over(task)
        return True

    def ask_all(self) -> bool:
        """Let all be asked, unless they were since a thread has run; return whether they are."""
        if self._all_asked:
            return False
        for tasks in self._of_host.values():
            for task in tasks:
                if task.at < 0:
                    self._may_be_over(task)
        self._all_asked = True
        return bool(self._maybe)

    # -- limits -----------------------------------------------------------------------------------------

    def next_limit_s(self) -> float:
        """Return when the next wait times out; infinite if none does."""
        while self._limits:
            limit = self._limits[0]
            if (
                limit.task.wait_number == limit.wait_number
                and limit.task in self._of_rank[limit.task.place.rank]
            ):
                return limit.at_s
            heapq.heappop(self._limits)
        return FOREVER

    def time_out(self, now_s: float) -> None:
        """Let those be asked that have waited till now."""
        while self._limits and self._limits[0].at_s <= now_s:
            task = heapq.heappop(self._limits).task
            if task.at < 0 and task in self._of_rank[task.place.rank]:
                self._may_be_over(task)


def _always() -> bool:
    return True
