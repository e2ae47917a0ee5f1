"""Counts of what ranks do, on hosts of different numbers."""

import gc
import os
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import mpisgd
from growth.counting import Count, counted, so_far, traffic_of_this_rank
from growth.programs import Acts
from mpisgd import elastic
from mpisgd.job.threads_as_ranks import LOST, lose_ranks, run_ranks

__all__ = ["Shape", "count_acts", "count_recovery", "memory_of_a_group"]

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
