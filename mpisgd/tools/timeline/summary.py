"""The statistics of a timeline: pure functions of its events.

Categories: `collective`: calls of the program; `carried`: calls of the Horovod engine for negotiated tensors;
`horovod`: those tensors; `message`: point to point; `blocked`: the program waited and did nothing else.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from mpisgd.timeline.accounts import MOVING

__all__ = ["Execution", "Late", "Overlap", "Row", "Summary", "executions", "summarise"]

Event = dict[str, Any]
Interval = tuple[float, float]


class Row(NamedTuple):
    """All operations of a kind; times in microseconds, of one rank each.

    Attributes:
        kind: of operation.
        where: its group or process set.
        algorithm: the algorithm or transport.
        num: operations; a collective of all ranks counts once.
        total_us: of an average rank, without the time in which it waited for others.
        median_us: of one operation on one rank, likewise.
        wait_us: of an average rank, for the others.
        nbytes: of an average rank.
    """

    kind: str
    where: str
    algorithm: str
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
    """How long a rank made others wait.

    Attributes:
        rank: of the job.
        times: how often it came last.
        total_us: how long others waited for it alone.
        median_us: how long after the last but one it came.
        worst_us: the maximum of that.
        worst: the operation of the maximum.
    """

    rank: int
    times: int
    total_us: float
    median_us: float
    worst_us: float
    worst: str


class Overlap(NamedTuple):
    """The communication of a rank, and the part of it for which the program did not wait."""

    rank: int
    communication_us: float
    hidden_us: float

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.hidden_us / self.communication_us if self.communication_us else 0.0


class Summary(NamedTuple):
    """The statistics of a timeline.

    Attributes:
        ranks: in the timeline.
        duration_us: from the first event to the last.
        num_common: operations of several ranks, of which one came last.
        lost: events that were dropped.
        clock_error_us: the largest error bound of a clock.
    """

    ranks: Sequence[int]
    duration_us: float
    rows: Sequence[Row]
    late: Sequence[Late]
    overlaps: Sequence[Overlap]
    num_common: int
    lost: int
    clock_error_us: float


class Execution(NamedTuple):
    """One operation on one rank.

    Attributes:
        what: kind, where and algorithm, as in `Row`.
        key: the same on all its ranks; None where ranks are not compared.
    """

    rank: int
    what: tuple[str, str, str]
    arrival_us: float
    moving_us: float
    wait_us: float
    nbytes: int
    label: str
    key: object = None


def summarise(events: Sequence[Event]) -> Summary:
    """Return the statistics of a timeline."""
    spans = [event for event in events if event["ph"] == "X"]
    times = [e["ts"] for e in events if "ts" in e] + [e["ts"] + e["dur"] for e in spans]
    found = executions(events)
    common = _common(found)
    about = [e["args"] for e in events if e["name"] == "mpisgd"]
    return Summary(
        sorted({args["rank"] for args in about}),
        max(times, default=0.0) - min(times, default=0.0),
        _rows(found),
        _late(common),
        _overlaps(spans),
        len(common),
        sum(e["args"]["events"] for e in events if e["name"] == "lost"),
        max((args["error_us"] for args in about), default=0.0),
    )


def executions(events: Sequence[Event]) -> list[Execution]:
    """Return the operations that were done: those of queues, negotiated tensors, messages."""
    tracks = {(e["pid"], e["tid"]): e["args"] for e in events if e["name"] == "thread_name"}
    queue = [
        _of_queue(e, tracks[e["pid"], e["tid"]]) for e in events if e["ph"] == "X" and e["cat"] in MOVING
    ]
    tensors = [_of_tensor(e) for e in events if e["ph"] == "b" and e.get("cat") == "horovod" and "args" in e]
    return [*queue, *tensors, *_messages(events)]


def _of_queue(event: Event, track: dict[str, Any]) -> Execution:
    args = event["args"]
    key = (track["name"], tuple(track["ranks"]), args.get("number"))
    return Execution(
        event["pid"],
        (event["name"], track["name"], args["transport"]),
        event["ts"] + args["arrived_us"],
        event["dur"] - args["wait_us"],
        args["wait_us"],
        args["bytes"],
        args["what"],
        key if event["cat"] == "collective" else None,
    )


def _of_tensor(event: Event) -> Execution:
    args = event["args"]
    return Execution(
        event["pid"],
        (args["operation"], f"hvd, set {args['process_set']}", args["transport"]),
        event["ts"] + (args["late_us"] or 0.0),
        args["queue_us"] + args["run_us"],
        args["negotiate_us"],
        args["bytes"],
        f"{args['operation']} {event['name']!r}",
        None if args["late_us"] is None else ("horovod", args["number"]),
    )


def _messages(events: Iterable[Event]) -> list[Execution]:
    """Return the messages, each from a pair of events."""
    begun: dict[tuple[int, str], Event] = {}
    found = []
    for event in events:
        if event.get("cat") != "message":
            continue
        key = (event["pid"], event["id2"]["local"])
        if event["ph"] == "b":
            begun[key] = event
        elif (begin := begun.pop(key, None)) is not None:
            what = (begin["name"].split()[0], "messages", "mpi")
            took_us, nbytes = event["ts"] - begin["ts"], begin["args"]["bytes"]
            found.append(Execution(begin["pid"], what, begin["ts"], took_us, 0.0, nbytes, begin["name"]))
    return found


def _rows(seen: Iterable[Execution]) -> list[Row]:
    """Return a row for each kind of operation, the longest total first."""
    groups: dict[tuple[str, str, str], list[Execution]] = defaultdict(list)
    for each in seen:
        groups[each.what].append(each)
    return sorted((_row(what, group) for what, group in groups.items()), key=lambda row: -row.total_us)


def _row(what: tuple[str, str, str], group: Sequence[Execution]) -> Row:
    by_rank = Counter(each.rank for each in group)
    return Row(
        *what,
        max(by_rank.values()),
        sum(each.moving_us for each in group) / len(by_rank),
        median(each.moving_us for each in group),
        sum(each.wait_us for each in group) / len(by_rank),
        sum(each.nbytes for each in group) / len(by_rank),
    )


def _common(seen: Iterable[Execution]) -> list[list[Execution]]:
    """Return the operations of several ranks, each sorted by arrival."""
    together: dict[object, list[Execution]] = defaultdict(list)
    for each in seen:
        if each.key is not None:
            together[each.key].append(each)
    whole = [group for group in together.values() if 1 < len(group) == len({each.rank for each in group})]
    return [sorted(group, key=lambda each: each.arrival_us) for group in whole]


def _late(common: Iterable[Sequence[Execution]]) -> list[Late]:
    by_rank: dict[int, list[tuple[Interval, str]]] = defaultdict(list)
    for *_, before, last in common:
        by_rank[last.rank].append(((before.arrival_us, last.arrival_us), last.label))
    late = []
    for rank, found in by_rank.items():
        times = [(last_us - before_us, label) for (before_us, last_us), label in found]
        total_us = _length(interval for interval, _ in found)  # several operations may have waited at once
        late.append(Late(rank, len(times), total_us, median(took for took, _ in times), *max(times)))
    return sorted(late, key=lambda each: -each.total_us)


# -- overlap ---------------------------------------------------------------------------------------------


def _overlaps(spans: Iterable[Event]) -> list[Overlap]:
    """Return the overlap of each rank: communication while the program was not blocked is hidden."""
    moving: dict[int, list[Interval]] = defaultdict(list)
    blocked: dict[int, list[Interval]] = defaultdict(list)
    for event in spans:
        interval = (event["ts"], event["ts"] + event["dur"])
        if event["cat"] in MOVING:
            moving[event["pid"]].append(interval)
        if event["cat"] == "blocked" or (event["cat"] == "collective" and event["args"]["blocking"]):
            blocked[event["pid"]].append(interval)
    return [
        Overlap(rank, _length(moving[rank]), _length(moving[rank] + blocked[rank]) - _length(blocked[rank]))
        for rank in sorted(moving)
    ]


def _length(intervals: Iterable[Interval]) -> float:
    """Return the length of the union of intervals."""
    covered_us, until_us = 0.0, float("-inf")
    for begin_us, end_us in sorted(intervals):
        covered_us += max(0.0, end_us - max(begin_us, until_us))
        until_us = max(until_us, end_us)
    return covered_us
