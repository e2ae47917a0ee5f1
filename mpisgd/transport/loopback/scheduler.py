"""`SeededScheduler`: lets one thread of many run at a time, and draws which one at each wait.

    thread 0   runs | waits for 1 .................. | runs
    thread 1        | runs | waits for a message ............ | runs
    thread 2               | runs, sends it, ends  |

Exactly one thread has the baton. At a wait it asks, in an order that the seed draws, whose wait is over, and
hands the baton to the first one. Where nobody's is, simulated time goes on to the next arrival of a message,
or else to the next limit of a wait: an hour takes no time, and a deadlock is found at once. The same seed
gives the same run, as long as what the threads do depends on nothing else.
"""

import heapq
import random
import threading
from collections.abc import Callable

from mpisgd.errors import Deadlock

__all__ = ["SeededScheduler", "Stopped"]

FOREVER = float("inf")
# To ask whether a wait is over may move things along, for that wait and for others that were asked before:
# so often all are asked without a message being sent or received, before time goes on.
QUIET_ROUNDS = 3


class Stopped(BaseException):
    """The run ends: raised in every thread that is left, at its wait."""


class _Task:
    """One thread."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.baton = threading.Lock()  # released by whoever hands it over; a semaphore of Python's is slower
        self.baton.acquire()
        self.ready: Callable[[], bool] = _always
        self.deadline_s = FOREVER
        self.timed_out = False
        self.error: BaseException | None = None


class SeededScheduler:
    """Decides who runs; see the module. A `mpisgd.threads.scheduling.Scheduler`.

    Args:
        seed: of all that is drawn.

    Attributes:
        random: draws, also for the messages between the ranks.
        num_events: how many messages were sent or received.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.num_events = 0
        self._now_s = 0.0
        self._tasks: dict[int, _Task] = {}  # of those that live, by thread; in the order of their starts
        self._starting: dict[threading.Thread, _Task] = {}
        self._arrivals: list[float] = []
        self._stopped = False
        self._all_over = threading.Event()

    # -- what waits ask, see `Scheduler` ----------------------------------------------------------------

    def now_s(self) -> float:
        """Return the simulated time."""
        return self._now_s

    def knows_this_thread(self) -> bool:
        """Return whether this thread runs by the baton."""
        return threading.get_ident() in self._tasks

    def wait(self, ready: Callable[[], bool], limit_s: float) -> bool:
        """Let others run until `ready()` holds or the limit is over.

        `ready` is called by whichever thread has the baton; what it raises is raised here.

        Raises:
            Deadlock: nobody's wait will ever be over, and none has a limit.
            Stopped: the run ends.
        """
        task = self._tasks[threading.get_ident()]
        task.ready, task.deadline_s = ready, self._now_s + limit_s
        task.timed_out, task.error = False, None
        self._hand_over(task)
        if task.error is not None:
            raise task.error
        return not task.timed_out

    def runs(self, thread: threading.Thread) -> bool:
        """Return whether a thread was started here and has not ended."""
        return any(task.thread is thread for task in self._tasks.values())

    def start(self, thread: threading.Thread, start: Callable[[], None]) -> None:
        """Start a thread, by `start()`; it runs when the baton comes to it."""
        task = _Task(thread)
        run = thread.run

        def run_in_turn() -> None:
            self._tasks[threading.get_ident()] = self._starting.pop(thread)
            begun.set()
            task.baton.acquire()
            try:
                if not self._stopped:
                    run()
            except BaseException:
                if not self._stopped:  # what follows from the end tells nobody anything
                    raise
            finally:
                self._end(task)

        begun = threading.Event()
        self._starting[thread] = task
        thread.run = run_in_turn  # type: ignore[method-assign]
        start()
        begun.wait()

    def arrives(self, at_s: float) -> None:
        """Note that something may be over at that time, such as the way of a message."""
        heapq.heappush(self._arrivals, at_s)

    # -- the baton ----------------------------------------------------------------------------------------

    def run(self, limit_s: float) -> bool:
        """Let the threads that were started run until all have ended; return whether they have.

        Args:
            limit_s: of real time; more means that a thread blocks or computes for ever.
        """
        if first := self._choose():
            first.baton.release()
            return self._all_over.wait(limit_s)
        return True

    def stop(self) -> None:
        """Let every thread end at its wait."""
        self._stopped = True

    @property
    def names(self) -> list[str]:
        """The names of the threads that live."""
        return [task.thread.name for task in self._tasks.values()]

    def _hand_over(self, task: _Task) -> None:
        if (chosen := self._choose()) is not task and chosen is not None:
            chosen.baton.release()
            task.baton.acquire()
        if self._stopped:
            raise Stopped

    def _end(self, task: _Task) -> None:
        self._tasks.pop(threading.get_ident())
        if (chosen := self._choose()) is not None:
            chosen.baton.release()
        else:
            self._all_over.set()

    def _choose(self) -> _Task | None:
        """Return whose wait is over, None where no thread is left."""
        while tasks := list(self._tasks.values()):
            if self._stopped:
                return tasks[0]
            num_quiet = 0
            while num_quiet < QUIET_ROUNDS:
                num_events = self.num_events
                self.random.shuffle(tasks)
                for task in tasks:
                    if self._is_over(task):
                        return task
                num_quiet = num_quiet + 1 if self.num_events == num_events else 0
            self._let_time_pass(tasks)
        return None

    def _is_over(self, task: _Task) -> bool:
        try:
            if task.error is not None or task.ready():
                return True
        except BaseException as exc:  # of that thread's wait
            task.error = exc
            return True
        task.timed_out = self._now_s >= task.deadline_s
        return task.timed_out

    def _let_time_pass(self, tasks: list[_Task]) -> None:
        """Go on to the next moment at which a wait may be over."""
        while self._arrivals and self._arrivals[0] <= self._now_s:
            heapq.heappop(self._arrivals)
        next_s = min([*self._arrivals[:1], *(task.deadline_s for task in tasks)])
        if next_s < FOREVER:
            self._now_s = next_s
            return
        names = ", ".join(sorted(task.thread.name for task in tasks))
        for task in tasks:
            task.error = Deadlock(f"all threads wait, and no wait has a limit: {names}")


def _always() -> bool:
    return True
