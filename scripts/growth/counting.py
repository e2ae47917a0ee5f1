"""What one rank sends, and how much Python it runs, while it does something.

Ranks are threads of one process, whose network counts messages (`mpisgd.transport.loopback.traffic`). Python
is counted in instructions of its bytecode, of some ranks only, without those of the network itself: it is
what a rank computes beside waiting, and the same in every run.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from mpisgd.job.lifecycle import current_job
from mpisgd.transport.loopback.traffic import Traffic

__all__ = ["Count", "counted", "instructions_of", "so_far", "traffic_of_this_rank"]

NETWORK = "/transport/loopback/"


class Count(NamedTuple):
    """What one rank has done.

    Attributes:
        messages: that it has sent.
        message_bytes: in these.
        partners: to how many ranks it has sent any, since the run began.
        calls: of MPI's collectives.
        call_bytes: what these took from it and gave to it.
        instructions: of Python; 0 where they were not counted.
    """

    messages: int
    message_bytes: int
    partners: int
    calls: int
    call_bytes: int
    instructions: int = 0

    def since(self, before: "Count") -> "Count":
        """Return what was done since, with the partners as they are."""
        less = [mine - theirs for mine, theirs in zip(self, before, strict=True)]
        return Count(*less)._replace(partners=self.partners)


def traffic_of_this_rank() -> Traffic:
    """Return what counts the messages of this rank, in whichever job it is."""
    communicator: Any = current_job().communicator
    traffic: Traffic = communicator.context.network.traffic[communicator.process]
    return traffic


def so_far(traffic: Traffic | None = None) -> Count:
    """Return what this rank has done since the run began."""
    found = traffic or traffic_of_this_rank()
    return Count(found.messages, found.message_bytes, len(found.partners), found.calls, found.call_bytes)


def counted(act: Callable[[], Any], *, instructions: bool) -> Count:
    """Do something on this rank; return what it took."""
    traffic = traffic_of_this_rank()
    before, number = so_far(traffic), 0
    if instructions:
        number = instructions_of(act)
    else:
        act()
    return so_far(traffic).since(before)._replace(instructions=number)


def instructions_of(act: Callable[[], Any]) -> int:
    """Do something; return how many instructions of Python's bytecode it took, without those of a network."""
    counter, outer = _Instructions(), sys.gettrace()
    sys.settrace(counter.trace)
    try:
        act()
    finally:
        sys.settrace(outer)
    return counter.number


class _Instructions:
    """Counts instructions of this thread, but for those of the network and of what that calls."""

    def __init__(self) -> None:
        self.number = 0
        self._inside = 0  # the network

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """See `sys.settrace`; called at each call."""
        if NETWORK in frame.f_code.co_filename:
            self._inside += 1
            frame.f_trace_lines = False
            return self._leave
        if self._inside:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._count

    def _leave(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return":
            self._inside -= 1
        return self._leave

    def _count(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "opcode":
            self.number += 1
        return self._count
