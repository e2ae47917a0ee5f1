"""Rank and size, within the job, within a host, and of hosts."""

from mpisgd.core.topology import Topology
from mpisgd.job.lifecycle import world

__all__ = ["local_rank", "local_size", "node_rank", "num_nodes", "rank", "size", "topology"]


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
