"""The timeline: its start and end on all ranks, and its events of each negotiated tensor.

Horovod starts and stops a timeline on rank 0 alone, so programs call it there alone, or everywhere. Here that
is a request that the engines of all ranks carry out in the cycle in which they learn of it.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpisgd import tracing
from mpisgd.core.group import Group
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.request_table import Decision
from mpisgd.timeline.session import close_timeline, open_timeline

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = [
    "IMMEDIATE",
    "BatchTimeline",
    "EngineTimeline",
    "request_of_environment",
    "start_request",
    "stop_request",
]

CYCLES = tracing.Track("Horovod cycles")


def start_request(path: str, mark_cycles: bool) -> Request:
    """Return the request to start a timeline."""
    return Request(f"start_timeline.{path}", "start_timeline", op=path, root=int(mark_cycles))


def stop_request() -> Request:
    """Return the request to stop it."""
    return Request("stop_timeline", "stop_timeline")


def request_of_environment(env: Mapping[str, str] = os.environ) -> Request | None:
    """Return the request that HOROVOD_TIMELINE stands for, None where it is not set.

    DYNAMIC, without which Horovod does not start a timeline later, stands for none.
    """
    path = env.get("HOROVOD_TIMELINE", "")
    if path in ("", "DYNAMIC"):
        return None
    return start_request(path, env.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") not in ("", "0"))


def _start(request: Request, communicator: "Communicator") -> None:
    open_timeline(request.op, communicator, mark_cycles=request.root == 1)


def _stop(request: Request, communicator: "Communicator") -> None:
    close_timeline()


# By kind, what is carried out as soon as one rank has submitted it.
IMMEDIATE: dict[str, Callable[[Request, "Communicator"], None]] = {
    "start_timeline": _start,
    "stop_timeline": _stop,
}


class EngineTimeline:
    """When the operations of one rank were submitted and negotiated, while a timeline is recorded."""

    def __init__(self) -> None:
        self._heard_ns: dict[tuple[int, str], int] = {}
        self._submitted_ns: dict[tuple[int, str], int] = {}
        self._decided_ns = 0
        self._num_decided = 0

    @property
    def on(self) -> bool:
        """Whether a timeline is recorded."""
        return tracing.sink is not None

    def submitted(self, request: Request) -> None:
        """Note that this rank has submitted an operation."""
        if self.on:
            self._submitted_ns[request.key] = time.monotonic_ns()

    def cycle(self) -> None:
        """Note that a cycle begins."""
        if tracing.sink is not None:
            tracing.sink.instant(CYCLES, "CYCLE_START", time.monotonic_ns())
        elif self._submitted_ns:
            self._submitted_ns.clear()
            self._heard_ns.clear()

    def heard(self, requests: Sequence[Request]) -> None:
        """Note that some rank has submitted these."""
        if self.on:
            now_ns = time.monotonic_ns()
            for request in requests:
                self._heard_ns.setdefault(request.key, now_ns)

    def decided(self) -> None:
        """Note that the decisions that come now were made at this moment."""
        self._decided_ns = time.monotonic_ns()

    def batch(self, decisions: Sequence[Decision], group: Group | None) -> "BatchTimeline | None":
        """Return the timeline of decisions that now run as one; None where nothing is recorded.

        All ranks number them alike, so that those of one number belong together.
        """
        first = self._num_decided + 1
        self._num_decided += len(decisions)
        if not self.on or group is None:
            return None
        negotiated = []
        for number, decision in enumerate(decisions, first):
            own = self._submitted_ns.pop(decision.request.key, None)
            heard = self._heard_ns.pop(decision.request.key, self._decided_ns)
            negotiated.append((decision.request, own, min(heard, own or heard), number))
        return BatchTimeline(negotiated, self._decided_ns, group)


class BatchTimeline:
    """Operations that run as one, while they do."""

    def __init__(
        self, negotiated: Sequence[tuple[Request, int | None, int, int]], decided_ns: int, group: Group
    ) -> None:
        self._negotiated = negotiated
        self._decided_ns = decided_ns
        self._group = group
        self._steps: list[tuple[str, int]] = []
        self._begun_ns = time.monotonic_ns()

    def step(self, name: str) -> None:
        """Begin a step of this name, which ends with the next step or with the batch."""
        self._steps.append((name, time.monotonic_ns()))

    def end(self, own: Sequence[Mapping[str, Any]]) -> None:
        """Write the events of all operations.

        Args:
            own: of each operation, what is told of this rank's tensors.
        """
        sink = tracing.sink
        if sink is None:
            return
        end_ns = time.monotonic_ns()
        ends = [begin_ns for _, begin_ns in self._steps[1:]] + [end_ns]
        steps = [(name, begin, end) for (name, begin), end in zip(self._steps, ends, strict=True)]
        together = len(self._negotiated)
        for (request, own_ns, first_ns, number), mine in zip(self._negotiated, own, strict=True):
            kind = request.kind.upper()
            phases = [
                (request.label, first_ns, end_ns),
                (f"NEGOTIATE_{kind}", first_ns, self._decided_ns),
                ("QUEUE", self._decided_ns, self._begun_ns),
                (kind, self._begun_ns, end_ns),
                *steps,
            ]
            args = {
                "operation": request.kind,
                "number": number,
                **mine,
                "process_set": request.set_id,
                "ranks": self._group.size,
                "transport": _transport_of(self._group),
                "together": together,
                "negotiate_us": (self._decided_ns - first_ns) / 1000,
                "queue_us": (self._begun_ns - self._decided_ns) / 1000,
                "run_us": (end_ns - self._begun_ns) / 1000,
                # When the other ranks could know that this one is ready, if it takes part by itself.
                "late_us": None if own_ns is None else (own_ns - first_ns) / 1000,
            }
            sink.overlapping("horovod", f"{request.set_id} {request.name}", phases, args)


def _transport_of(group: Group) -> str:
    if group.shm is not None:
        return "node"
    return "mpi" if group.internode is None else "hierarchical"
