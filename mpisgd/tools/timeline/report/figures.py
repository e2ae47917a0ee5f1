"""The numbers of the report that lie over time or between hosts: pure functions of a timeline's events.

Of each rank the time of its program is divided into four parts that add up to all of it:

    computation     it does not wait for mpisgd
    communication   it waits while data moves
    wait            it waits for another rank: to come to an operation, to negotiate, or to send a message
    other           it waits for something else: the turn of its operation, say

What moves while the program computes is hidden and in none of the last three.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpisgd.tools.timeline.summary import MOVING, Execution

__all__ = [
    "Coverage",
    "Division",
    "Floats",
    "Link",
    "MemoryFigures",
    "Steps",
    "divisions_of",
    "links_of",
    "memory_of",
    "steps_of",
]


Floats = npt.NDArray[np.float64]


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


Event = dict[str, Any]
Intervals = list[tuple[float, float]]
# What moves an operation's bytes where it is not a message of MPI's, which are counted when they are sent.
MEDIA = {
    "node": "shared memory",
    "bucket by bucket": "shared memory",
    "hierarchical": "shared memory",
    "direct": "cross-memory attach",
    "mpi": "MPI's collectives",
}


class Steps(NamedTuple):
    """The steps of one rank: their numbers, and when they began and ended, in microseconds."""

    numbers: list[int]
    begins: Floats
    ends: Floats


class Division(NamedTuple):
    """The parts of some stretches of a rank's time, see above, in microseconds; `hidden` is beside them."""

    computation: Floats
    communication: Floats
    wait: Floats
    other: Floats
    hidden: Floats


class MemoryFigures(NamedTuple):
    """The memory of one rank over time: of its own, shared with other processes, and on its GPU."""

    at_us: list[float]
    own: list[int]
    shared: list[int]
    device: list[int]


class Link(NamedTuple):
    """What was sent from a host to another, or moved within it.

    Attributes:
        source: name of the host.
        destination: likewise.
        medium: `messages`, or how an operation's tensors moved.
        nbytes: of messages; or of those tensors.
    """

    source: str
    destination: str
    medium: str
    nbytes: int


# -- steps -------------------------------------------------------------------------------------------------


def steps_of(events: Sequence[Event]) -> dict[int, Steps]:
    """Return the steps of each rank, of the optimizer that has made most of them."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        if event.get("cat") == "step":
            found[names[event["pid"], event["tid"]]][event["pid"]].append(event)
    if not found:
        return {}
    most = max(found, key=lambda name: (sum(map(len, found[name].values())), -len(name)))
    return {rank: _as_steps(found[most][rank]) for rank in sorted(found[most])}


def _as_steps(events: Iterable[Event]) -> Steps:
    ordered = sorted(events, key=lambda event: event["ts"])
    begins = np.array([event["ts"] for event in ordered])
    ends = np.array([event["ts"] + event["dur"] for event in ordered])
    return Steps([event["args"]["number"] for event in ordered], begins, ends)


# -- where the time goes -----------------------------------------------------------------------------------


def divisions_of(events: Sequence[Event], stretches: dict[int, tuple[Floats, Floats]]) -> dict[int, Division]:
    """Return how the time of each rank's program divides, of each stretch by itself.

    Args:
        events: of a timeline.
        stretches: of each rank, begins and ends.
    """
    moving: dict[int, Intervals] = defaultdict(list)
    waiting: dict[int, Intervals] = defaultdict(list)
    blocked: dict[int, Intervals] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            _sort_in(event, moving[event["pid"]], waiting[event["pid"]], blocked[event["pid"]])
    for rank, interval in _asynchronous_waits(events):
        waiting[rank].append(interval)
    return {rank: _divide(moving[rank], waiting[rank], blocked[rank], *stretches[rank]) for rank in stretches}


def _sort_in(event: Event, moving: Intervals, waiting: Intervals, blocked: Intervals) -> None:
    """Add the parts of a span to what they are."""
    begin, end, args = event["ts"], event["ts"] + event["dur"], event["args"]
    if event["cat"] in (*MOVING, "negotiation"):
        arrived = begin + args["arrived_us"]
        waiting.append((arrived, arrived + args["wait_us"]))
    if event["cat"] in MOVING:
        moving.extend([(begin, arrived), (arrived + args["wait_us"], end)])
    if event["cat"] == "blocked" or (event["cat"] == "collective" and args["blocking"]):
        blocked.append((begin, end))


def _asynchronous_waits(events: Iterable[Event]) -> list[tuple[int, tuple[float, float]]]:
    """Return the waits with their ranks that others of their kind overlap: for messages, and to negotiate."""
    begun: dict[tuple[int, str, str], float] = {}
    found = []
    for event in events:
        if event["ph"] not in ("b", "e") or not (
            event["cat"] == "message" or event["name"].startswith("NEGOTIATE_")
        ):
            continue
        key = (event["pid"], event["id2"]["local"], event["name"])
        if event["ph"] == "b":
            begun[key] = event["ts"]
        elif key in begun:
            found.append((event["pid"], (begun.pop(key), event["ts"])))
    return found


def _divide(
    moving: Intervals, waiting: Intervals, blocked: Intervals, begins: Floats, ends: Floats
) -> Division:
    """Return the parts; where data moves in one group while another waits, the program is said to move it."""
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


# -- memory and links --------------------------------------------------------------------------------------


def memory_of(events: Iterable[Event]) -> dict[int, MemoryFigures]:
    """Return the memory of each rank."""
    found: dict[int, MemoryFigures] = {}
    for event in events:
        if event["ph"] == "C" and event["name"] == "memory":
            memory = found.setdefault(event["pid"], MemoryFigures([], [], [], []))
            memory.at_us.append(event["ts"])
            for name in ("own", "shared", "device"):
                getattr(memory, name).append(event["args"][name])
    return dict(sorted(found.items()))


def links_of(events: Iterable[Event], done: Iterable[Execution], hosts: dict[int, str]) -> list[Link]:
    """Return the bytes that went from host to host, the most first.

    Args:
        events: of a timeline.
        done: what was done in it, see `mpisgd.tools.timeline.summary.executions`.
        hosts: of the ranks.
    """
    nbytes: dict[tuple[str, str, str], int] = defaultdict(int)
    last = {e["pid"]: e["args"] for e in events if e["ph"] == "C" and e["name"] == "bytes sent"}
    for rank, sent in last.items():
        for to, count in sent.items():
            nbytes[hosts[rank], hosts.get(int(to.split()[-1]), "?"), "messages"] += count
    for each in done:
        medium = MEDIA.get(each.what[2])
        if medium is not None and each.what[1] != "messages":
            nbytes[hosts[each.rank], hosts[each.rank], medium] += each.nbytes
    return sorted((Link(*key, count) for key, count in nbytes.items()), key=lambda link: -link.nbytes)
