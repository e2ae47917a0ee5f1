"""What a timeline says in numbers; pure functions of its events.

Categories: `collective`, what the program called; `carried`, what the engine called for negotiated tensors;
`horovod`, those tensors; `message`; `blocked`, when the program waited and did nothing else.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

__all__ = ["Late", "Overlap", "Row", "Summary", "summarise"]

Event = dict[str, Any]
Interval = tuple[float, float]
MOVING = ("collective", "carried")


class Row(NamedTuple):
    """All operations of a kind; times in microseconds, of one rank each.

    Attributes:
        kind: of operation.
        where: its group, or how it is negotiated.
        way: the plane or algorithm.
        num: operations; what all ranks do together is one.
        total_us: of an average rank, without the time in which it waited for others.
        median_us: of one operation on one rank, likewise.
        wait_us: of an average rank, for the others.
        nbytes: of an average rank.
    """

    kind: str
    where: str
    way: str
    num: int
    total_us: float
    median_us: float
    wait_us: float
    nbytes: float

    @property
    def bytes_per_s(self) -> float:
        """Bytes of a rank's tensors by the time they took."""
        return self.nbytes / self.total_us * 1e6 if self.total_us else 0.0


class Late(NamedTuple):
    """How a rank made others wait.

    Attributes:
        rank: which.
        times: how often it came last.
        total_us: how long it alone was missing somewhere.
        median_us: how much later than the last but one it came.
        worst_us: the same, the worst time.
        worst: what that was.
    """

    rank: int
    times: int
    total_us: float
    median_us: float
    worst_us: float
    worst: str


class Overlap(NamedTuple):
    """Communication of a rank, and for how much of it the program did not wait."""

    rank: int
    communication_us: float
    hidden_us: float

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.hidden_us / self.communication_us if self.communication_us else 0.0


class Summary(NamedTuple):
    """A timeline in numbers.

    Attributes:
        ranks: those it has.
        duration_us: from the first thing to the last.
        num_common: operations in which several ranks met, so that one came last.
        lost: notes that did not fit into memory.
        clock_error_us: how far off the worst clock may be.
    """

    ranks: Sequence[int]
    duration_us: float
    rows: Sequence[Row]
    late: Sequence[Late]
    overlaps: Sequence[Overlap]
    num_common: int
    lost: int
    clock_error_us: float


class _Seen(NamedTuple):
    """One operation on one rank. `key`: the same on all ranks; None where none of them meets it."""

    rank: int
    kind: str
    where: str
    way: str
    begin_us: float
    arrival_us: float
    moving_us: float
    wait_us: float
    nbytes: int
    label: str
    key: object


def summarise(events: Sequence[Event]) -> Summary:
    """Return the numbers of a timeline."""
    tracks = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    queue = [_of_queue(e, tracks[e["pid"], e["tid"]]) for e in spans if e["cat"] in MOVING]
    tensors = [_of_tensor(e) for e in events if e["ph"] == "b" and e.get("cat") == "horovod" and "args" in e]
    program = [_of_queue(e, tracks[e["pid"], e["tid"]]) for e in spans if e["cat"] == "collective"]
    times = [e["ts"] for e in events if "ts" in e] + [e["ts"] + e["dur"] for e in spans]
    common = _common([*program, *tensors])
    about = [e["args"] for e in events if e["name"] == "mpisgd"]
    return Summary(
        sorted({args["rank"] for args in about}),
        max(times, default=0.0) - min(times, default=0.0),
        _rows([*queue, *tensors, *_messages(events)]),
        _late(common),
        _overlaps(spans),
        len(common),
        sum(e["args"]["events"] for e in events if e["name"] == "lost"),
        max((args["error_us"] for args in about), default=0.0),
    )


def _of_queue(event: Event, track: dict[str, Any]) -> _Seen:
    args = event["args"]
    return _Seen(
        event["pid"],
        event["name"],
        track["name"],
        args["way"],
        event["ts"],
        event["ts"] + args["arrived_us"],
        event["dur"] - args["wait_us"],
        args["wait_us"],
        args["bytes"],
        args["what"],
        (track["name"], tuple(track["ranks"]), args.get("number")),
    )


def _of_tensor(event: Event) -> _Seen:
    args = event["args"]
    return _Seen(
        event["pid"],
        args["operation"],
        f"hvd, set {args['process_set']}",
        args["plane"],
        event["ts"],
        event["ts"] + (args["late_us"] or 0.0),
        args["queue_us"] + args["run_us"],
        args["negotiate_us"],
        args["bytes"],
        f"{args['operation']} {event['name']!r}",
        None if args["late_us"] is None else ("horovod", args["number"]),
    )


def _messages(events: Iterable[Event]) -> list[_Seen]:
    """Pair the beginnings and ends of messages."""
    begun: dict[tuple[int, str], Event] = {}
    found = []
    for event in events:
        if event.get("cat") != "message":
            continue
        key = (event["pid"], event["id2"]["local"])
        if event["ph"] == "b":
            begun[key] = event
        elif (begin := begun.pop(key, None)) is not None:
            found.append(_of_message(begin, event["ts"]))
    return found


def _of_message(begin: Event, end_us: float) -> _Seen:
    kind, at_us = begin["name"].split()[0], begin["ts"]
    took_us, nbytes = end_us - at_us, begin["args"]["bytes"]
    return _Seen(
        begin["pid"], kind, "messages", "mpi", at_us, at_us, took_us, 0.0, nbytes, begin["name"], None
    )


def _rows(seen: Iterable[_Seen]) -> list[Row]:
    """Return a row for each kind of operation, those that took longest first."""
    groups: dict[tuple[str, str, str], list[_Seen]] = defaultdict(list)
    for each in seen:
        groups[each.kind, each.where, each.way].append(each)
    return sorted((_row(*key, group) for key, group in groups.items()), key=lambda row: -row.total_us)


def _row(kind: str, where: str, way: str, group: Sequence[_Seen]) -> Row:
    num_ranks = len({each.rank for each in group})
    return Row(
        kind,
        where,
        way,
        max(Counter(each.rank for each in group).values()),
        sum(each.moving_us for each in group) / num_ranks,
        median(each.moving_us for each in group),
        sum(each.wait_us for each in group) / num_ranks,
        sum(each.nbytes for each in group) / num_ranks,
    )


def _common(seen: Iterable[_Seen]) -> list[list[_Seen]]:
    """Return the operations in which several ranks met, each by the order of arrival."""
    together: dict[object, list[_Seen]] = defaultdict(list)
    for each in seen:
        if each.key is not None:
            together[each.key].append(each)
    whole = [group for group in together.values() if 1 < len(group) == len({each.rank for each in group})]
    return [sorted(group, key=lambda each: each.arrival_us) for group in whole]


def _late(common: Iterable[Sequence[_Seen]]) -> list[Late]:
    by_rank: dict[int, list[tuple[Interval, str]]] = defaultdict(list)
    for *_, before, last in common:
        by_rank[last.rank].append(((before.arrival_us, last.arrival_us), last.label))
    late = [_lateness(rank, found) for rank, found in by_rank.items()]
    return sorted(late, key=lambda each: -each.total_us)


def _lateness(rank: int, found: Sequence[tuple[Interval, str]]) -> Late:
    times = [(last_us - before_us, label) for (before_us, last_us), label in found]
    total_us = _length(interval for interval, _ in found)  # several operations may have waited at once
    return Late(rank, len(times), total_us, median(took for took, _ in times), *max(times))


# -- overlap ---------------------------------------------------------------------------------------------


def _overlaps(spans: Iterable[Event]) -> list[Overlap]:
    moving: dict[int, list[Interval]] = defaultdict(list)
    blocked: dict[int, list[Interval]] = defaultdict(list)
    for event in spans:
        interval = (event["ts"], event["ts"] + event["dur"])
        if event["cat"] in MOVING:
            moving[event["pid"]].append(interval)
        if event["cat"] == "blocked" or (event["cat"] == "collective" and event["args"]["blocking"]):
            blocked[event["pid"]].append(interval)
    return [_overlap(rank, moving[rank], blocked[rank]) for rank in sorted(moving)]


def _overlap(rank: int, moving: Sequence[Interval], blocked: Sequence[Interval]) -> Overlap:
    """What is in either but not in what blocks is hidden."""
    communication_us = _length(moving)
    hidden_us = _length([*moving, *blocked]) - _length(blocked)
    return Overlap(rank, communication_us, hidden_us)


def _length(intervals: Iterable[Interval]) -> float:
    """Return how much time intervals cover together."""
    covered_us, until_us = 0.0, float("-inf")
    for begin_us, end_us in sorted(intervals):
        covered_us += max(0.0, end_us - max(begin_us, until_us))
        until_us = max(until_us, end_us)
    return covered_us
