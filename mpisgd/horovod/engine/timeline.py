"""The timeline: its start and end on all ranks, and its events of each negotiated tensor.

Horovod starts and stops a timeline on rank 0 alone, so programs call it there alone, or everywhere. Here that
is a request that the engines of all ranks carry out in the cycle in which they learn of it.
"""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from mpisgd import tracing
from mpisgd.collectives.dispatch import transport_for
from mpisgd.core.group import Group
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_table import Decision
from mpisgd.timeline.session import close_timeline, open_timeline

__all__ = [
    "STOP",
    "BatchTimeline",
    "EngineTimeline",
    "change_timeline",
    "request_of_environment",
    "start_request",
]

CYCLES = tracing.Track("Horovod cycles")
STOP = Request("stop_timeline", "stop_timeline")


def start_request(path: str, mark_cycles: bool) -> Request:
    """Return the request to start a timeline; `STOP` is that to stop it."""
    return Request(f"start_timeline.{path}", "start_timeline", op=path, root=int(mark_cycles))


def request_of_environment(env: Mapping[str, str] = os.environ) -> Request | None:
    """Return the request that HOROVOD_TIMELINE stands for, None where it is not set.

    DYNAMIC, without which Horovod does not start a timeline later, stands for none.
    """
    path = env.get("HOROVOD_TIMELINE", "")
    if path in ("", "DYNAMIC"):
        return None
    return start_request(path, env.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))


def change_timeline(request: Request, group: Group) -> None:
    """Start or stop the timeline. Collective over `group`, which is of all ranks."""
    if request == STOP:
        close_timeline()
    else:
        open_timeline(request.op, group, mark_cycles=request.root == 1)


class EngineTimeline:
    """When operations were negotiated, while a timeline is recorded."""

    def __init__(self) -> None:
        self._heard_ns: dict[tuple[int, str], int] = {}
        self._decided_ns = 0
        self._num_decided = 0

    def cycle(self) -> None:
        """Note that a cycle begins."""
        if tracing.sink is not None:
            tracing.sink.instant(CYCLES, "CYCLE_START", time.monotonic_ns())
        else:
            self._heard_ns.clear()

    def heard(self, requests: Sequence[Request]) -> None:
        """Note that some rank has submitted these."""
        if tracing.sink is not None:
            now_ns = time.monotonic_ns()
            for request in requests:
                self._heard_ns.setdefault(request.key, now_ns)

    def decided(self) -> None:
        """Note that the decisions that come now were made at this moment."""
        self._decided_ns = time.monotonic_ns()

    def batch(
        self, decisions: Sequence[Decision], entries: Sequence[Entry | None], group: Group | None
    ) -> "BatchTimeline":
        """Return the timeline of decisions that now run as one, on a group if this rank is in it.

        All ranks number them alike, so that those of one number belong together.
        """
        first = self._num_decided + 1
        self._num_decided += len(decisions)
        timeline = BatchTimeline(self._decided_ns, group)
        if tracing.sink is not None and group is not None:
            for number, (decision, entry) in enumerate(zip(decisions, entries, strict=True), first):
                heard_ns = self._heard_ns.pop(decision.request.key, self._decided_ns)
                own_ns = entry.submitted_ns if entry else None
                first_ns = min(heard_ns, own_ns or heard_ns)
                timeline.operations.append(_Negotiated(decision.request, entry, number, first_ns))
        return timeline


class _Negotiated(NamedTuple):
    """An operation of a batch: this rank's part, its number among all, and when any rank had submitted it."""

    request: Request
    entry: Entry | None
    number: int
    first_ns: int


@dataclass
class BatchTimeline:
    """Operations that run as one, while they do.

    Attributes:
        decided_ns: when the ranks had decided on them.
        group: on which they run.
        operations: those that are recorded.
    """

    decided_ns: int
    group: Group | None
    operations: list[_Negotiated] = field(default_factory=list)
    _steps: list[tuple[str, int]] = field(default_factory=list)
    _begun_ns: int = field(default_factory=time.monotonic_ns)

    def step(self, name: str) -> None:
        """Begin a step of this name, which ends with the next step or with the batch."""
        self._steps.append((name, time.monotonic_ns()))

    def end(self) -> None:
        """Write the events of all operations."""
        sink, group = tracing.sink, self.group
        if sink is None or group is None or not self.operations:
            return
        end_ns = time.monotonic_ns()
        ends = [begin_ns for _, begin_ns in self._steps[1:]] + [end_ns]
        steps = [(name, begin, end) for (name, begin), end in zip(self._steps, ends, strict=True)]
        for request, entry, number, first_ns in self.operations:
            kind, own_ns = request.kind.upper(), entry.submitted_ns if entry else None
            phases = [
                (request.label, first_ns, end_ns),
                (f"NEGOTIATE_{kind}", first_ns, self.decided_ns),
                ("QUEUE", self.decided_ns, self._begun_ns),
                (kind, self._begun_ns, end_ns),
                *steps,
            ]
            args = {
                "operation": request.kind,
                "number": number,
                "bytes": entry.nbytes if entry else 0,
                **((entry and entry.contents) or {}),
                "process_set": request.set_id,
                "ranks": group.size,
                "transport": _transport_of(group),
                "together": len(self.operations),
                "negotiate_us": (self.decided_ns - first_ns) / 1000,
                "queue_us": (self._begun_ns - self.decided_ns) / 1000,
                "run_us": (end_ns - self._begun_ns) / 1000,
                # When the other ranks could know that this one is ready, if it takes part by itself.
                "late_us": None if own_ns is None else (own_ns - first_ns) / 1000,
            }
            sink.overlapping("horovod", f"{request.set_id} {request.name}", phases, args)


def _transport_of(group: Group) -> str:
    transport = transport_for(group, "all_reduce", None, 0)
    return "mpi" if transport is None else transport.name
