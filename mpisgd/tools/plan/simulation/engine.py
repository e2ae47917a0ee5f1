"""`simulate`: when tasks end that wait for each other and share resources.

A task takes an amount of each of its resources: bytes of a link, seconds of a core. While it runs, all of
these advance together, at the rate that the scarcest of them allows. Tasks that meet at a resource have equal
shares of it, unless they can use less (max-min fairness, by progressive filling):

    link, 1 GB/s     a: 1 GB |####----|          a and b have half of the link each until a is done
                     b: 2 GB |####----########|
    seconds                  0       2        3

Nothing happens between two events, the start and the end of a task, so only these are computed.

Source: max-min fairness, Bertsekas and Gallager 1992, "Data Networks", 6.5.2; fluid simulation of contention
as in SimGrid, Casanova and others 2014.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mpisgd.errors import InvalidArgument

__all__ = ["Span", "Task", "simulate"]

# Events as near to each other, relative to the time so far, are one event: rounding parts what is equal.
SAME = 1e-12


@dataclass(frozen=True)
class Task:
    """Something that takes time.

    Attributes:
        name: for timelines.
        demands: the amount of each resource, by name; 0 or more.
        after: the places of the tasks that must have ended before, all smaller than its own.
        delay_s: from their end to its beginning, such as a link's latency.
        seconds: what it takes at least, whatever resources there are.
        while_used: what it takes at least while others use a resource, by name; it uses nothing of that.
        track: the row of a timeline in which it is drawn.
    """

    name: str
    demands: Mapping[str, float] = field(default_factory=dict)
    after: tuple[int, ...] = ()
    delay_s: float = 0.0
    seconds: float = 0.0
    track: str = ""
    while_used: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """When a task ran: from the end of its delay to its own end, in seconds since the start of all."""

    start_s: float
    end_s: float


def simulate(tasks: Sequence[Task], capacities: Mapping[str, float]) -> list[Span]:
    """Return when each task runs.

    Args:
        tasks: each after those that it waits for.
        capacities: of each resource, per second; above zero.

    Raises:
        InvalidArgument: a task waits for a later one, or needs a resource that there is not.
    """
    _check(tasks, capacities)
    return _Simulation(tasks, capacities).run()


def _check(tasks: Sequence[Task], capacities: Mapping[str, float]) -> None:
    for place, task in enumerate(tasks):
        if any(not 0 <= before < place for before in task.after):
            raise InvalidArgument(f"task {place} ({task.name}) waits for {task.after}; expected earlier ones")
        for name, amount in task.demands.items():
            if not capacities.get(name, 0.0) > 0.0:
                raise InvalidArgument(f"task {task.name}: resource {name!r} has no capacity")
            if not 0.0 <= amount < math.inf:
                raise InvalidArgument(f"task {task.name}: {amount} of {name!r}; expected 0 or more")


@dataclass
class _Running:
    """A task that has begun: the share of it that is left, and what its rate cannot exceed.

    `caps` are those of while others use a resource.
    """

    place: int
    demands: tuple[tuple[str, float], ...]
    cap: float
    caps: tuple[tuple[str, float], ...] = ()
    left: float = 1.0
    rate: float = 0.0


class _Simulation:
    """The state between two events."""

    def __init__(self, tasks: Sequence[Task], capacities: Mapping[str, float]) -> None:
        self._tasks, self._capacities = tasks, capacities
        self._now = 0.0
        self._waits_for = [len(set(task.after)) for task in tasks]
        self._followers: list[list[int]] = [[] for _ in tasks]
        for place, task in enumerate(tasks):
            for before in set(task.after):
                self._followers[before].append(place)
        self._due: list[tuple[float, int]] = []  # tasks whose delay runs
        self._running: list[_Running] = []
        self._starts, self._ends = [0.0] * len(tasks), [0.0] * len(tasks)

    def run(self) -> list[Span]:
        """Go from event to event until all tasks have ended."""
        for place, count in enumerate(self._waits_for):
            if not count:
                heapq.heappush(self._due, (self._tasks[place].delay_s, place))
        while self._due or self._running:
            self._start_due()
            share_out(self._running, self._capacities)
            self._advance(self._next_event())
            self._end_done()
        return [Span(*times) for times in zip(self._starts, self._ends, strict=True)]

    def _next_event(self) -> float:
        ends = [self._now + run.left / run.rate for run in self._running]
        return min([*ends, *(due[0] for due in self._due[:1])], default=self._now)

    def _start_due(self) -> None:
        """Start what is due now; what takes nothing ends at once, and may make others due."""
        while self._due and self._due[0][0] <= self._now * (1 + SAME):
            at, place = heapq.heappop(self._due)
            task = self._tasks[place]
            self._starts[place] = at
            demands = tuple((name, amount) for name, amount in task.demands.items() if amount > 0.0)
            least = max([task.seconds, *(amount / self._capacities[name] for name, amount in demands)])
            slow = [(name, most) for name, most in task.while_used.items() if most > 0.0]
            if least > 0.0 or slow:
                least = max(least, SAME) if slow else least  # over at once, unless others slow it down
                caps = tuple((name, 1.0 / max(least, most)) for name, most in slow)
                self._running.append(_Running(place, demands, 1.0 / least, caps))
            else:
                self._end(place, at)

    def _advance(self, until: float) -> None:
        for run in self._running:
            run.left -= run.rate * (until - self._now)
        self._now = until

    def _end_done(self) -> None:
        done = [run for run in self._running if run.left <= SAME * max(1.0, self._now * run.rate)]
        if done:
            self._running = [run for run in self._running if run.left > SAME * max(1.0, self._now * run.rate)]
        for run in done:
            self._end(run.place, self._now)

    def _end(self, place: int, at: float) -> None:
        self._ends[place] = at
        for follower in self._followers[place]:
            self._waits_for[follower] -= 1
            if not self._waits_for[follower]:
                heapq.heappush(self._due, (at + self._tasks[follower].delay_s, follower))


def share_out(running: Sequence[_Running], capacities: Mapping[str, float]) -> None:
    """Give every running task its rate: the largest at which nobody could have more without another less.

    The resource of which an equal share is least is shared out first: equally, except that who can use less
    leaves the rest to others. What those get is then settled, and so on with what is left of the others.
    Resources that tasks use together are compared by these shares, and so are of one unit.
    """
    users: dict[str, list[tuple[_Running, float]]] = {}
    for run in running:
        for name, amount in run.demands:
            users.setdefault(name, []).append((run, amount))
    for run in running:
        run.rate = min([run.cap, *(cap for name, cap in run.caps if name in users)])
    free = {name: capacities[name] for name in users if _is_contended(users[name], capacities[name])}
    settled: set[int] = set()
    levels = {name: _level(users[name], free[name], settled) for name in free}
    while levels and (least := min(levels.values())) < math.inf:
        # Where others have the same share, settling one of them does not change it.
        changed: set[str] = set()
        for name in [name for name, level in levels.items() if level <= least * (1 + SAME)]:
            changed |= _settle(users[name], least, settled, free)
            del levels[name], free[name]
        for name in changed & levels.keys():
            levels[name] = _level(users[name], free[name], settled)


def _is_contended(users: Sequence[tuple[_Running, float]], capacity: float) -> bool:
    return len(users) > 1 and sum(run.cap * amount for run, amount in users) > capacity * (1 + SAME)


def _level(users: Sequence[tuple[_Running, float]], free: float, settled: set[int]) -> float:
    """Return the most that one user may have of a resource so that all get as much or what they can use."""
    wanted = sorted(run.rate * amount for run, amount in users if run.place not in settled)
    for count, want in zip(range(len(wanted), 0, -1), wanted, strict=True):
        if want * count >= free * (1 - SAME):
            return max(0.0, free) / count
        free -= want
    return math.inf


def _settle(
    users: Sequence[tuple[_Running, float]], level: float, settled: set[int], free: dict[str, float]
) -> set[str]:
    """Hold those to the level who would take more; return the resources of which they use less now."""
    changed: set[str] = set()
    for run, amount in users:
        if run.place in settled or run.rate * amount < level * (1 - SAME):
            continue
        run.rate = level / amount
        settled.add(run.place)
        for name, other in run.demands:
            if name in free:
                free[name] -= run.rate * other
                changed.add(name)
    return changed
