"""The verdict on a run with faults, from the event logs of its ranks."""

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOLERANCE = 1e-6
# How much more a process may have at the end than in its first world: TCP connections to new ranks.
SPARE = {"memory": 0, "memory_bytes": 0, "of_mpi": 0, "files": 8}
Event = dict[str, Any]


@dataclass
class Verdict:
    """The result of a run.

    Attributes:
        faults: number of injected faults.
        finished: whether the last step was finished.
        ended: number of ranks that ended normally.
        wrong: broken promises; empty if there are none.
        steps_lost: of each fault, the number of repeated steps.
        recovery_s: of each fault, the time until the next finished step.
        sizes: the numbers of ranks, in order.
    """

    faults: int
    finished: bool
    ended: int = 0
    wrong: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    recovery_s: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


def read_events(folder: Path) -> list[Event]:
    """The events of all processes, sorted by time, without incomplete lines."""
    found = []
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return sorted(found, key=lambda event: event["t"])


def judge(events: Sequence[Event], expected: Sequence[float]) -> Verdict:
    """Compare a run with one without faults.

    Args:
        events: of all ranks and injectors.
        expected: the loss of every step of the run without faults.
    """
    faults = [event for event in events if event["event"] == "fault"]
    steps = [event for event in events if event["event"] == "step"]
    verdict = Verdict(len(faults), any(event["step"] == len(expected) - 1 for event in steps))
    verdict.wrong += [text for event in steps if (text := _wrong_loss(event, expected))]
    verdict.sizes = _sizes(events)
    verdict.ended = sum(event["event"] == "end" for event in events)
    verdict.wrong += _what_grew(events)
    for number, fault in enumerate(faults):
        until = faults[number + 1]["t"] if number + 1 < len(faults) else math.inf
        _judge_fault(verdict, fault, [event for event in events if event["t"] < until])
    return verdict


def _wrong_loss(event: Event, expected: Sequence[float]) -> str:
    want = expected[event["step"]]
    if math.isclose(event["loss"], want, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        return ""
    return f"step {event['step']} on {event['size']} ranks: loss {event['loss']!r}, without faults {want!r}"


def _what_grew(events: Sequence[Event]) -> list[str]:
    """Shared memory and open files that grow with the number of survived losses."""
    held: dict[int, list[dict[str, int]]] = defaultdict(list)
    for event in events:
        if "holds" in event:
            held[event["pid"]].append(event["holds"])
    return [
        f"process {pid} survived {len(times) - 1} losses: it has {what} {times[-1][what]}, before {first}"
        for pid, times in held.items()
        for what, more in SPARE.items()
        if times[-1][what] > (first := times[0][what]) + more
    ]


def _sizes(events: Sequence[Event]) -> list[int]:
    sizes = [event["size"] for event in events if event["event"] in ("begin", "step")]
    return [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]]


def _judge_fault(verdict: Verdict, fault: Event, events: Sequence[Event]) -> None:
    """Add the cost of one fault; `events` end before the next one."""
    after = [event for event in events if event["t"] > fault["t"]]
    again = [event for event in after if event["event"] == "begin"]
    if not again:  # a process that slept, a slow link, the last moment of the run
        verdict.steps_lost.append(0)
        verdict.recovery_s += _time_to_a_step(after, fault["t"])
        return
    before = [event for event in events if event["t"] < again[0]["t"]]
    done = 1 + max((event["step"] for event in before if event["event"] == "step"), default=-1)
    resumed = min(event["step"] for event in again)
    verdict.steps_lost.append(max(0, done - resumed))
    verdict.recovery_s += _time_to_a_step(
        [event for event in after if event["t"] > again[-1]["t"]], fault["t"]
    )
    kept = _kept([event for event in before if event["t"] < fault["t"]], {event["pid"] for event in again})
    if resumed < kept:
        verdict.wrong.append(f"went on from step {resumed}, although step {kept} was kept")


def _time_to_a_step(events: Sequence[Event], since: float) -> list[float]:
    return [event["t"] - since for event in events if event["event"] == "step"][:1]


def _kept(before: Sequence[Event], survivors: set[int]) -> int:
    """The last step that must not be lost: committed on every remaining rank, or saved by any."""
    known = survivors & {event["pid"] for event in before}
    last: dict[int, int] = defaultdict(int)
    for event in before:
        if event["event"] == ("committed" if known else "saved"):
            last[event["pid"]] = max(last[event["pid"]], event["step"])
    return min(last[pid] for pid in known) if known else max(last.values(), default=0)
