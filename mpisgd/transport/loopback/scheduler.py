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
import itertools
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from mpisgd.errors import Deadlock
from mpisgd.threads.scheduling import Cancellation
from mpisgd.threads.service_thread import ServiceThread
from mpisgd.transport.loopback.draws import Draws
from mpisgd.transport.loopback.faults import Fault, Faults
from mpisgd.transport.loopback.waits import NOWHERE, Place, Task, Waits

__all__ = ["Place", "SeededScheduler", "Stopped"]

FOREVER = float("inf")
LATE = 64  # of the threads that have ended, so many may not quite have


class Stopped(BaseException):
    """The run ends: raised in every thread that is left, at its wait."""


class _Arrival(NamedTuple):
    """Something that happens at a time; `number` orders those of equal times."""

    at_s: float
    number: int
    happen: Callable[[], None]


class SeededScheduler:
    """Decides who runs; see the module. A `mpisgd.threads.scheduling.Scheduler`.

    Args:
        draws: the random numbers, also of the messages between the ranks.
        faults: what fails.

    Attributes:
        draws: as given.
        left_over: the names of the threads that served others, and of whose others none was left.
        at_wait: called whenever a thread of a rank is about to wait, with the rank.
    """

    def __init__(self, draws: Draws, faults: Sequence[Fault] = ()) -> None:
        self.draws = draws
        self._faults = Faults(faults)
        self.left_over: list[str] = []
        self.at_wait: Callable[[int], None] = lambda rank: None
        self._now_s = 0.0
        self._tasks: dict[int, Task] = {}  # of those that live, by thread; in the order of their starts
        self._starting: dict[threading.Thread, Task] = {}
        self._running: set[threading.Thread] = set()
        self._ending: deque[threading.Thread] = deque(maxlen=LATE)
        self._lost: dict[int, Task] = {}  # of lost ranks: they stand where they were until the run ends
        self._at_loss: defaultdict[int, list[Callable[[], object]]] = defaultdict(list)
        self._waits = Waits(draws)
        self._arrivals: list[_Arrival] = []
        self._deferred: list[Callable[[], None]] = []
        self._numbers = itertools.count()
        self._cancellations: dict[int, Cancellation] = {}
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
        if not self._stopped:
            self.at_wait(task.place.rank)
        task.begin(ready, self._now_s + limit_s)
        self._waits.has_begun(task)
        self._hand_over(task)
        if task.error is not None:
            raise task.error
        return not task.timed_out

    def runs(self, thread: threading.Thread) -> bool:
        """Return whether a thread was started here and has not ended."""
        return thread in self._running

    def start(self, thread: threading.Thread, start: Callable[[], None], place: Place | None = None) -> None:
        """Start a thread, by `start()`; it runs when the baton comes to it.

        Args:
            thread: not started yet.
            start: starts it.
            place: which rank it belongs to; None: to that of the thread that starts it.
        """
        if place is None:
            starter = self._tasks.get(threading.get_ident())
            place = NOWHERE if starter is None else starter.place
        task = Task(thread, place)
        run = thread.run

        def run_in_turn() -> None:
            self._tasks[threading.get_ident()] = self._starting.pop(thread)
            self._waits.add(task)
            begun.set()
            task.baton.acquire()
            try:
                # Who serves also ends what others have queued, which nothing would ever free.
                if not self._stopped or isinstance(thread, ServiceThread):
                    run()
            except BaseException:
                if not self._stopped:  # what follows from the end tells nobody anything
                    raise
            finally:
                self._end(task)

        begun = threading.Event()
        self._starting[thread] = task
        self._running.add(thread)
        thread.run = run_in_turn  # type: ignore[method-assign]
        start()
        begun.wait()

    def cancellation(self) -> Cancellation:
        """Return whether the waits of a rank are cancelled: of this thread's, or whose wait it asks."""
        place = (self._waits.asked or self._tasks[threading.get_ident()]).place
        return self._cancellations.setdefault(place.rank, Cancellation())

    def at_loss(self, end: Callable[[], object]) -> None:
        """Call `end` where the rank of this thread is lost."""
        self._at_loss[self._tasks[threading.get_ident()].place.rank].append(end)

    def at_fault_point(self, kind: str, nbytes: int) -> int:
        """Return how many of so many bytes a thread of a rank writes here.

        Raises:
            OSError: it fails.
        """
        return self._faults.at_point(kind, self._tasks[threading.get_ident()].place.rank, nbytes)

    # -- what the network tells -----------------------------------------------------------------------

    def at(self, at_s: float, happen: Callable[[], None]) -> None:
        """Let something happen at that time, such as the arrival of a message; before waits time out."""
        heapq.heappush(self._arrivals, _Arrival(at_s, next(self._numbers), happen))

    def soon(self, happen: Callable[[], None]) -> None:
        """Let something happen now, or once it is known whether the wait is over that is being asked."""
        if self._waits.asked is None:
            happen()
        else:
            self._deferred.append(happen)

    def concern(self, rank: int) -> None:
        """Note that waits of a rank may be over now, by what no thread of its host has done."""
        self._waits.concern(rank)

    def lose(self, ranks: Collection[int]) -> None:
        """Let the threads of these ranks stand where they are. They end with the run, after all others.

        Does not return to a thread of these.

        Raises:
            Stopped: in such a thread, at the end of the run.
        """
        for ident, task in list(self._tasks.items()):
            if task.place.rank in ranks:
                self._lost[ident] = self._tasks.pop(ident)
                self._waits.remove(task)
        for rank in ranks:
            for end in self._at_loss.pop(rank, ()):
                end()
        mine = self._lost.get(threading.get_ident())
        if mine is not None:
            self._hand_over(mine)

    # -- the baton ----------------------------------------------------------------------------------------

    def run(self, limit_s: float) -> bool:
        """Let the threads that were started run until all have ended; return whether they have.

        Args:
            limit_s: of real time; more means that a thread blocks or computes for ever.
        """
        if first := self._choose():
            first.baton.release()
            if not self._all_over.wait(limit_s):
                return False
            for thread in self._ending:  # what their frames hold is freed then
                thread.join()
        return True

    def stop(self) -> None:
        """Let every thread end at its wait."""
        self._stopped = True

    @property
    def names(self) -> list[str]:
        """The names of the threads that live, without those of lost ranks."""
        return [task.thread.name for task in self._tasks.values()]

    def _hand_over(self, task: Task) -> None:
        chosen = self._choose()
        if chosen is not task and chosen is not None:
            chosen.baton.release()
            task.baton.acquire()
        if self._stopped:
            raise Stopped

    def _end(self, task: Task) -> None:
        self._tasks.pop(threading.get_ident())
        self._running.remove(task.thread)
        self._ending.append(task.thread)
        self._waits.remove(task)
        chosen = self._choose()
        if chosen is not None:
            chosen.baton.release()
        else:
            self._all_over.set()

    # -- who is next ----------------------------------------------------------------------------------------

    def _choose(self) -> Task | None:
        """Return whose wait is over, None where no thread is left."""
        while self._tasks or self._lost:
            if not self._tasks:  # the others have ended: now lost ones may do what ends do
                self._stopped = True
                self._tasks, self._lost = self._lost, {}
                for task in self._tasks.values():
                    self._waits.add(task)
            if self._stopped:
                return next(iter(self._tasks.values()))
            chosen = self._waits.next_over(self._now_s)
            while self._deferred:
                self._deferred.pop(0)()
            if chosen is None:
                self._let_time_pass()
            elif chosen not in self._lost.values():
                return chosen
        return None

    def _let_time_pass(self) -> None:
        """Go on to the next moment at which a wait may be over."""
        arrives_s = self._arrivals[0].at_s if self._arrivals else FOREVER
        ends_s = self._waits.next_limit_s()
        if arrives_s <= ends_s and arrives_s < FOREVER:
            self._now_s = max(self._now_s, arrives_s)
            while self._arrivals and self._arrivals[0].at_s <= self._now_s:
                heapq.heappop(self._arrivals).happen()
        elif not self._waits.ask_all():  # before a wait times out: it may be over by what nobody has noted
            if ends_s < FOREVER:
                self._now_s = max(self._now_s, ends_s)
                self._waits.time_out(self._now_s)
            else:
                self._end_deadlock()

    def _end_deadlock(self) -> None:
        """Let all end that wait for ever, but for those that wait for somebody to serve."""
        waiting = [task for task in self._tasks.values() if not isinstance(task.thread, ServiceThread)]
        if not waiting:
            self.left_over = self.names
            self._stopped = True
        names = ", ".join(sorted(task.thread.name for task in waiting))
        for task in waiting:
            self._waits.fail(task, Deadlock(f"all threads wait, and no wait has a limit: {names}"))
