"""What the engine tells a recorder: for each tensor when it was negotiated, queued, copied and moved."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from mpisgd import tracing
from mpisgd.core.group import Group
from mpisgd.horovod.engine.request import Request
from mpisgd.horovod.engine.table import Decision

__all__ = ["Batch", "Record"]

ENGINE = tracing.Track("Horovod cycles")


class Record:
    """The negotiations of one rank, as far as somebody records them.

    Attributes:
        on: whether somebody does.
    """

    def __init__(self) -> None:
        self._heard_ns: dict[tuple[int, str], int] = {}
        self._submitted_ns: dict[tuple[int, str], int] = {}
        self._decided_ns = 0
        self._num_decided = 0

    @property
    def on(self) -> bool:
        """Whether somebody records."""
        return tracing.sink is not None

    def submitted(self, request: Request) -> None:
        """This rank has submitted an operation."""
        if self.on:
            self._submitted_ns[request.key] = time.monotonic_ns()

    def cycle(self) -> None:
        """A cycle begins."""
        if tracing.sink is not None:
            tracing.sink.instant(ENGINE, "CYCLE_START", time.monotonic_ns())
        elif self._submitted_ns:
            self._submitted_ns.clear()
            self._heard_ns.clear()

    def heard(self, requests: Sequence[Request]) -> None:
        """Some rank has told of these."""
        if self.on:
            now_ns = time.monotonic_ns()
            for request in requests:
                self._heard_ns.setdefault(request.key, now_ns)

    def decided(self) -> None:
        """What comes now was decided at this moment."""
        self._decided_ns = time.monotonic_ns()

    def batch(self, decisions: Sequence[Decision], group: Group | None) -> "Batch | None":
        """Decisions are carried out together, from now on; None where nobody records that.

        All ranks count them alike, so that those of one number belong together.
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
        return Batch(negotiated, self._decided_ns, group)


class Batch:
    """Operations that run together, while they do."""

    def __init__(
        self, negotiated: Sequence[tuple[Request, int | None, int, int]], decided_ns: int, group: Group
    ) -> None:
        self._negotiated = negotiated
        self._decided_ns = decided_ns
        self._group = group
        self._steps: list[tuple[str, int]] = []
        self._begun_ns = time.monotonic_ns()

    def step(self, name: str) -> None:
        """What follows has this name, until the next step or the end."""
        self._steps.append((name, time.monotonic_ns()))

    def ends(self, own: Sequence[Mapping[str, Any]]) -> None:
        """All are done.

        Args:
            own: of each operation, what this rank had in it.
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
                "plane": _plane_of(self._group),
                "together": together,
                "negotiate_us": (self._decided_ns - first_ns) / 1000,
                "queue_us": (self._begun_ns - self._decided_ns) / 1000,
                "run_us": (end_ns - self._begun_ns) / 1000,
                # When the other ranks could know that this one is ready, if it takes part by itself.
                "late_us": None if own_ns is None else (own_ns - first_ns) / 1000,
            }
            sink.overlapping("horovod", f"{request.set_id} {request.name}", phases, args)


def _plane_of(group: Group) -> str:
    if group.shm is not None:
        return "node"
    return "mpi" if group.internode is None else "hierarchical"
