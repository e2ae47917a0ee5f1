"""Where the time of a rank goes, and by what its bytes travel: the definitions of reports and of metrics.

The time of a rank's program is divided into four parts that add up to all of it:

    computation     it does not wait for mpisgd
    communication   it waits while data moves
    wait            it waits for another rank: to come to an operation, to negotiate, or to send a message
    other           it waits for something else: the turn of its operation, say

What moves while the program computes is hidden and in none of the last three.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["MEDIA", "MOVING", "Activity", "Coverage", "Division", "Floats", "is_wait"]

Floats = npt.NDArray[np.float64]
Intervals = list[tuple[float, float]]

# Operations that move data: calls of the program, and those of Horovod's engine for negotiated tensors.
MOVING = ("collective", "carried")
# What moves an operation's bytes where it is not a message of MPI's, which are counted when they are sent.
MEDIA = {
    "node": "shared memory",
    "bucket by bucket": "shared memory",
    "hierarchical": "shared memory",
    "direct": "cross-memory attach",
    "mpi": "MPI's collectives",
}


class Coverage:
    """The union of intervals.

    Args:
        intervals: (begin, end), in any order; they may overlap.
    """

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        merged: list[list[float]] = []
        for begin, end in sorted(intervals):
            if merged and begin <= merged[-1][1]:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([begin, end])
        self._edges = np.array(merged or [[0.0, 0.0]]).reshape(-1)
        lengths = np.diff(self._edges)
        lengths[1::2] = 0.0  # between two intervals
        self._covered = np.concatenate([[0.0], np.cumsum(lengths)])

    def within(self, begins: Floats, ends: Floats) -> Floats:
        """Return how much of each stretch [begin, end] is covered."""
        return self._until(ends) - self._until(begins)

    def _until(self, times: Floats) -> Floats:
        """Return how much was covered up to each of some moments: linear between two edges."""
        found: Floats = np.interp(times, self._edges, self._covered)
        return found


class Division(NamedTuple):
    """The parts of some stretches of a rank's time, see above; `hidden` is beside them."""

    computation: Floats
    communication: Floats
    wait: Floats
    other: Floats
    hidden: Floats


class Activity:
    """When a rank's data moved, when it waited for others, and when its program did nothing else.

    Attributes:
        moving: intervals (begin, end), in any order and unit; they may overlap. So are the next two.
        waiting: for other ranks.
        blocked: the program's.
    """

    def __init__(self) -> None:
        self.moving: Intervals = []
        self.waiting: Intervals = []
        self.blocked: Intervals = []

    def add_span(
        self, cat: str, begin: float, end: float, args: Mapping[str, Any], *, us: float = 1.0
    ) -> None:
        """Add the parts of a span; `cat` and `args` as in `mpisgd.tracing`, `us`: a microsecond."""
        if cat in (*MOVING, "negotiation"):
            arrived = begin + args["arrived_us"] * us
            all_arrived = arrived + args["wait_us"] * us
            self.waiting.append((arrived, all_arrived))
            if cat in MOVING:
                self.moving.extend([(begin, arrived), (all_arrived, end)])
        if cat == "blocked" or (cat == "collective" and args["blocking"]):
            self.blocked.append((begin, end))

    def add_overlapping(self, cat: str, name: str, begin: float, end: float) -> None:
        """Add what others of its kind may overlap; only waits count: for messages, and to negotiate."""
        if is_wait(cat, name):
            self.waiting.append((begin, end))

    def divide(self, begins: Floats, ends: Floats) -> Division:
        """Return the parts of some stretches.

        Where data moves in one group while another waits, the program is said to move it.
        """
        moving, blocked, waiting = self.moving, self.blocked, self.waiting
        inside = Coverage(blocked).within(begins, ends)
        moves = Coverage(moving).within(begins, ends)
        blocked_or_moving = Coverage(blocked + moving).within(begins, ends)
        blocked_or_either = Coverage(blocked + moving + waiting).within(begins, ends)
        either = Coverage(moving + waiting).within(begins, ends)
        communication = inside + moves - blocked_or_moving  # both at once
        wait = inside + either - blocked_or_either - communication
        return Division(
            np.maximum(ends - begins - inside, 0.0),
            np.maximum(communication, 0.0),
            np.maximum(wait, 0.0),
            np.maximum(inside - communication - wait, 0.0),
            np.maximum(moves - communication, 0.0),
        )

    def forget(self, until: float) -> None:
        """Drop what was over by a moment."""
        for intervals in (self.moving, self.waiting, self.blocked):
            intervals[:] = [each for each in intervals if each[1] > until]


def is_wait(cat: str, name: str) -> bool:
    """Return whether what others of its kind may overlap is a wait: for a message, or to negotiate."""
    return cat == "message" or name.startswith("NEGOTIATE_")
