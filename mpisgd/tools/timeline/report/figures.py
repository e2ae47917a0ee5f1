"""The numbers of the report that lie over time or between hosts: pure functions of a timeline's events.

`mpisgd.timeline.accounts` says into which parts the time is divided.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpisgd.timeline.accounts import MEDIA, Activity, Division, Floats, is_wait
from mpisgd.tools.timeline.summary import Execution

__all__ = ["Link", "MemoryFigures", "Steps", "divisions_of", "links_of", "memory_of", "steps_of"]


Event = dict[str, Any]


class Steps(NamedTuple):
    """The steps of one rank: their numbers, and when they began and ended, in microseconds."""

    numbers: list[int]
    begins: Floats
    ends: Floats


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
    activity: dict[int, Activity] = defaultdict(Activity)
    for event in events:
        if event["ph"] == "X":
            begin, end = event["ts"], event["ts"] + event["dur"]
            activity[event["pid"]].add_span(event["cat"], begin, end, event["args"])
    for rank, interval in _asynchronous_waits(events):
        activity[rank].waiting.append(interval)
    return {rank: activity[rank].divide(*stretch) for rank, stretch in stretches.items()}


def _asynchronous_waits(events: Iterable[Event]) -> list[tuple[int, tuple[float, float]]]:
    """Return the waits with their ranks that others of their kind overlap: for messages, and to negotiate."""
    begun: dict[tuple[int, str, str], float] = {}
    found = []
    for event in events:
        if event["ph"] not in ("b", "e") or not is_wait(event["cat"], event["name"]):
            continue
        key = (event["pid"], event["id2"]["local"], event["name"])
        if event["ph"] == "b":
            begun[key] = event["ts"]
        elif key in begun:
            found.append((event["pid"], (begun.pop(key), event["ts"])))
    return found


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
