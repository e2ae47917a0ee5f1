"""Counts of what ranks do, on hosts of different numbers: what one sends, and how much Python it runs.

Ranks are threads of one process, whose network counts messages (`mpisgd.transport.loopback.traffic`). Python
is counted in instructions of its bytecode, of some ranks only, without those of the network itself: it is
what a rank computes beside waiting, and the same in every run.
"""

import gc
import os
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple

import mpisgd
from growth.programs import Acts
from mpisgd import elastic
from mpisgd.job.lifecycle import current_job
from mpisgd.job.threads_as_ranks import LOST, lose_ranks, run_ranks
from mpisgd.transport.loopback.traffic import Traffic

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


LIMIT_S = 3600.0


class Shape(NamedTuple):
    """Hosts, and how many ranks each of them has."""

    hosts: int
    ranks_per_host: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return f"{self.hosts} x {self.ranks_per_host}"


def run(shape: Shape, program: Callable[[], Any], **options: Any) -> list[Any]:
    """Run a program on all ranks, of which the one runs that has waited longest; messages take no time."""
    hosts = (shape.ranks_per_host,) * shape.hosts
    return run_ranks(
        shape.size, program, ranks_per_host=hosts, num_draws=0, limit_s=LIMIT_S, timeout_s=1e6, **options
    )


def count_acts(
    shape: Shape, acts_of: Callable[[], Acts], *, traced: Sequence[int] = (0, -1)
) -> dict[str, Count]:
    """Do acts on all ranks, one after the other; return the most that a rank has taken, each count by itself.

    Args:
        shape: the hosts.
        acts_of: called on each rank, outside of what is counted.
        traced: the ranks whose Python is counted, which takes long.

    Returns:
        By name of the act; "init" is the making of the world, "shutdown" its end.
    """
    places = {rank % shape.size for rank in traced}

    def program() -> dict[str, Count]:
        is_traced = mpisgd.rank() in places
        found = {"init": so_far()}
        for name, act in acts_of().items():
            mpisgd.barrier()
            found[name] = counted(act, instructions=is_traced)
        mpisgd.barrier()
        found["shutdown"] = counted(mpisgd.shutdown, instructions=is_traced)
        return found

    counts = run(shape, program)
    return {name: most([each[name] for each in counts]) for name in counts[0]}


def most(counts: Sequence[Count]) -> Count:
    """Return the largest of each count."""
    return Count(*map(max, zip(*counts, strict=True)))


def count_recovery(shape: Shape) -> Count:
    """Lose the last rank; return the most that another takes until `elastic.run` goes on."""

    def program() -> Count:
        marks = []
        traffic = traffic_of_this_rank()

        @elastic.run
        def go_on(state: elastic.State) -> None:
            mpisgd.barrier()
            marks.append(so_far(traffic))
            if len(marks) == 1:
                if mpisgd.rank() == shape.size - 1:
                    lose_ranks(shape.size - 1)
                mpisgd.barrier()

        go_on(elastic.State(step=0))
        return marks[1].since(marks[0])

    return most([each for each in run(shape, program, losses=()) if each is not LOST])


def memory_of_a_group(shape: Shape) -> tuple[int, float]:
    """Return the bytes of Python's memory that a group takes of each rank, and the descriptors."""

    def program() -> tuple[int, int]:
        mpisgd.barrier()
        before = tracemalloc.get_traced_memory()[0], len(os.listdir("/proc/self/fd"))
        mpisgd.barrier()
        group = mpisgd.new_group()
        mpisgd.barrier(group)
        gc.collect()
        mpisgd.barrier()
        after = tracemalloc.get_traced_memory()[0], len(os.listdir("/proc/self/fd"))
        mpisgd.barrier()
        return after[0] - before[0], after[1] - before[1]

    tracemalloc.start()
    try:
        taken, opened = run(shape, program)[0]
    finally:
        tracemalloc.stop()
    return taken // shape.size, opened / shape.size
