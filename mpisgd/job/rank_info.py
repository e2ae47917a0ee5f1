"""Rank and size, within the job, within a host, and of hosts; what one rank does for all."""

from typing import Any

from mpisgd.config import launcher_rank
from mpisgd.core.topology import Topology
from mpisgd.job.lifecycle import is_initialized, world

__all__ = [
    "is_main",
    "local_rank",
    "local_size",
    "node_rank",
    "num_nodes",
    "print0",
    "rank",
    "size",
    "topology",
]


def topology() -> Topology:
    """Return which ranks of the job share a host."""
    return world().topology


def rank() -> int:
    """Return this process's rank in the job, 0 to size() - 1."""
    return world().rank


def size() -> int:
    """Return the number of ranks of the job."""
    return world().size


def local_rank() -> int:
    """Return this rank's index among the ranks of its host."""
    return topology().local_rank


def local_size() -> int:
    """Return how many ranks share this host."""
    return topology().local_size


def node_rank() -> int:
    """Return the index of this rank's host, counted from 0."""
    return topology().node_rank


def num_nodes() -> int:
    """Return the number of hosts the job runs on."""
    return topology().num_nodes


def is_main() -> bool:
    """Return whether this is rank 0 of the job: the one that prints, logs and saves.

    Before `init()` it uses the rank that the launcher has set, and does not start MPI. Do not call collective
    functions, such as `mpisgd.checkpoint.save`, under `if is_main():`.
    """
    return rank() == 0 if is_initialized() else launcher_rank() in (None, 0)


def print0(*args: Any, **options: Any) -> None:
    """Print on rank 0 alone, with the arguments of `print`."""
    if is_main():
        print(*args, **options)
