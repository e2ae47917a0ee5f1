"""Who goes on when ranks are lost: those that are left, unless others may think the same of themselves.

A rank that was killed is gone. A host that does not answer may be at work behind a cut network, and its ranks
may take all others for lost. Then only one side may go on: the one with more ranks, and where both have as
many the one with the lowest.
"""

from collections.abc import Collection, Sequence

__all__ = ["goes_on", "silent_hosts"]


def silent_hosts(nodes: Sequence[Sequence[int]], left: Collection[int]) -> list[int]:
    """Return the hosts none of whose ranks is left: they may be dead, or only out of reach.

    Args:
        nodes: the ranks of each host before the loss.
        left: the ranks that are left.
    """
    return [host for host, ranks in enumerate(nodes) if not set(ranks) & set(left)]


def goes_on(nodes: Sequence[Sequence[int]], left: Collection[int]) -> bool:
    """Return whether the ranks that are `left` may go on; arguments as above."""
    doubtful = {rank for host in silent_hosts(nodes, left) for rank in nodes[host]}
    if len(left) != len(doubtful):
        return len(left) > len(doubtful)
    return min(left) < min(doubtful)
