"""Alignment of the ranks' clocks, so that simultaneous events have the same time in a timeline."""

import os
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.timeline.transfer import receive, send

__all__ = ["Clock", "align", "offset_by_messages"]

ROUNDS = 20
TIMEOUT_S = 60.0
TAG = 1


class Clock(NamedTuple):
    """The conversion of this rank's time to that of the timeline.

    Attributes:
        origin_ns: the start, by rank 0's clock.
        offset_ns: rank 0's clock minus this rank's clock.
        error_ns: the bound of the error of the offset.
    """

    origin_ns: int = 0
    offset_ns: int = 0
    error_ns: int = 0

    def to_us(self, at_ns: int) -> float:
        """Return microseconds since the origin."""
        return (at_ns + self.offset_ns - self.origin_ns) / 1000


def align(communicator: GroupCommunicator) -> Clock:
    """Return this rank's clock. Collective.

    Ranks under one kernel share a clock. The others exchange ping-pong messages with rank 0.
    """
    gathered = communicator.all_gather_object((_which_clock(), time.monotonic_ns()))
    (first, origin_ns) = gathered[0]
    offset_ns = error_ns = 0
    for rank, (which, _) in enumerate(gathered):
        if which != first and communicator.rank in (0, rank):
            offset_ns, error_ns = offset_by_messages(communicator, rank)
    return Clock(origin_ns, offset_ns, error_ns)


def _which_clock() -> tuple[str, str]:
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return boot, os.readlink("/proc/self/ns/time") if os.path.exists("/proc/self/ns/time") else ""


def offset_by_messages(
    communicator: GroupCommunicator, other: int, now_ns: Callable[[], int] = time.monotonic_ns
) -> tuple[int, int]:
    """Return the offset of rank 0's clock to that of `other`, and the bound of its error.

    Called by both; on rank 0 it is (0, 0). The fastest of some ping-pongs counts: rank 0 read its clock
    between its two ends, in the middle if both messages took equally long.
    """
    question, answer = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    if communicator.rank == 0:
        for _ in range(ROUNDS):
            receive(communicator, question, other, TAG, TIMEOUT_S)
            answer[0] = now_ns()
            send(communicator, answer, other, TAG, TIMEOUT_S)
        return 0, 0
    best_ns, offset_ns = 2**62, 0
    for _ in range(ROUNDS):
        begin_ns = now_ns()
        send(communicator, question, 0, TAG, TIMEOUT_S)
        receive(communicator, answer, 0, TAG, TIMEOUT_S)
        end_ns = now_ns()
        if end_ns - begin_ns < best_ns:
            best_ns, offset_ns = end_ns - begin_ns, int(answer) - (begin_ns + end_ns) // 2
    return offset_ns, best_ns // 2
