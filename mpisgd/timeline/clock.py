"""The ranks' clocks, so that what happened at the same time is drawn at the same place."""

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mpisgd.core.waiting import Backoff
from mpisgd.errors import CollectiveTimeout

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["Clock", "align", "offset_by_messages"]

ROUNDS = 20
LIMIT_S = 60.0
TAG = 1


class Clock(NamedTuple):
    """How this rank's time becomes that of the timeline.

    Attributes:
        origin_ns: when rank 0 began, by its clock.
        offset_ns: what to add to this rank's clock to get rank 0's.
        error_ns: how far off that may be.
    """

    origin_ns: int = 0
    offset_ns: int = 0
    error_ns: int = 0

    def to_us(self, at_ns: int) -> float:
        """Return microseconds since the origin."""
        return (at_ns + self.offset_ns - self.origin_ns) / 1000


def align(wire: "Communicator") -> Clock:
    """Return this rank's clock. Collective.

    Ranks under one kernel have one clock. The others send messages to and fro with rank 0.
    """
    everyone = wire.all_gather_object((_which_clock(), time.monotonic_ns()))
    (first, origin_ns) = everyone[0]
    offset_ns = error_ns = 0
    for rank, (which, _) in enumerate(everyone):
        if which != first and wire.rank in (0, rank):
            offset_ns, error_ns = offset_by_messages(wire, rank)
    return Clock(origin_ns, offset_ns, error_ns)


def _which_clock() -> tuple[str, str]:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return boot, os.readlink("/proc/self/ns/time") if os.path.exists("/proc/self/ns/time") else ""


def offset_by_messages(
    wire: "Communicator", other: int, now_ns: Callable[[], int] = time.monotonic_ns
) -> tuple[int, int]:
    """Return what `other` must add to its clock to get rank 0's, and how far off that may be.

    Called by both; on rank 0 it is (0, 0). The quickest of some messages to and fro counts: rank 0 read its
    clock somewhere between the two ends, in the middle if both ways took as long.
    """
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    if wire.rank == 0:
        for _ in range(ROUNDS):
            _through(wire, lambda: wire.irecv(question, other, TAG))
            answer[0] = now_ns()
            _through(wire, lambda: wire.isend(answer, other, TAG))
        return 0, 0
    best_ns, offset_ns = 2**62, 0
    for _ in range(ROUNDS):
        begin_ns = now_ns()
        _through(wire, lambda: wire.isend(question, 0, TAG))
        _through(wire, lambda: wire.irecv(answer, 0, TAG))
        end_ns = now_ns()
        if end_ns - begin_ns < best_ns:
            best_ns, offset_ns = end_ns - begin_ns, int(answer) - (begin_ns + end_ns) // 2
    return offset_ns, best_ns // 2


def _through(wire: "Communicator", start: Callable[[], Any]) -> None:
    request = start()
    if not Backoff(LIMIT_S).wait_for(lambda: wire.poll([request])):
        raise CollectiveTimeout(f"timeline: rank {wire.rank} has waited {LIMIT_S:g} s for another's clock")
