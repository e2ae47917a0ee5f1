"""Counts of all acts on some hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import mpisgd
from growth.counting import Count, counted, so_far
from growth.programs import Acts
from mpisgd.job.threads_as_ranks import run_ranks

__all__ = ["Shape", "Tally", "count_acts"]

LIMIT_S = 3600.0


class Shape(NamedTuple):
    """Hosts, and how many ranks each of them has."""

    hosts: int
    ranks_per_host: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts * self.ranks_per_host


class Tally(NamedTuple):
    """What an act has taken.

    Attributes:
        most: of any rank, each count by itself.
        total: of all ranks; of partners, the pairs.
    """

    most: Count
    total: Count


def count_acts(
    shape: Shape, acts_of: Callable[[], Acts], *, instructions: Sequence[int] = (0, -1)
) -> Mapping[str, Tally]:
    """Do acts on all ranks, one after the other; return what each has taken, and "init" what came before.

    Args:
        shape: the hosts.
        acts_of: called on each rank, outside of what is counted.
        instructions: the ranks whose Python is counted, which takes long.
    """
    traced = {rank % shape.size for rank in instructions}

    def program() -> dict[str, Count]:
        found = {"init": so_far()}
        for name, act in acts_of().items():
            mpisgd.barrier()
            found[name] = counted(act, instructions=mpisgd.rank() in traced)
        return found

    counts = run_ranks(
        shape.size,
        program,
        ranks_per_host=(shape.ranks_per_host,) * shape.hosts,
        num_draws=0,
        limit_s=LIMIT_S,
        timeout_s=1e6,
    )
    return {name: tally([each[name] for each in counts]) for name in counts[0]}


def tally(counts: Sequence[Count]) -> Tally:
    """Return the largest and the sum of each count."""
    columns = list(zip(*counts, strict=True))
    return Tally(Count(*map(max, columns)), Count(*map(sum, columns)))
