"""Groups whose ranks live on several hosts, some of them with a single rank, pretended on one machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import mpisgd
from mpisgd.core.group import Group
from mpisgd.core.topology import arrange
from mpisgd.job.group_factory import make_group
from mpisgd.job.lifecycle import world
from mpisgd.tuning import CostModel

# For each number of ranks, the first rank of every rank's host.
UNEVEN = {2: [0, 1], 3: [0, 0, 2], 4: [0, 1, 1, 1]}
EVEN = {2: [0, 1], 3: [0, 1, 2], 4: [0, 0, 2, 2]}


@contextlib.contextmanager
def group_of_hosts(leaders: Sequence[int], costs: CostModel | None = None) -> Iterator[Group]:
    """A group of all ranks; `leaders`: the first rank of every rank's host. Collective."""
    where = arrange(mpisgd.rank(), leaders, [f"host{leader}" for leader in leaders])
    communicator = world().queue.communicator.duplicate()
    made = make_group(
        "hosts",
        range(mpisgd.size()),
        communicator,
        timeout_s=20,
        threads_allowed=True,
        topology=where,
        costs=costs,
    )
    made.job = world().job
    yield made
    made.queue.drain()
    made.free()
