"""From the ranks that were measured to others: how many steps an all-reduce takes, and what its links carry.

Groups use the profile of the job they are part of, and nobody measures every group. What carries over is
latency per step and bandwidth per byte on the busiest link; what changes is how many of each there are.
"""

import math
from collections.abc import Sequence

__all__ = ["kind", "link_share", "num_steps"]

RanksPerHost = Sequence[int]


def kind(ranks_per_host: RanksPerHost) -> str:
    """Return what is comparable: one host, hosts with a rank each, or hosts with several."""
    if len(ranks_per_host) == 1:
        return "one host"
    return "one rank per host" if max(ranks_per_host) == 1 else "several ranks per host"


def link_share(algorithm: str, ranks_per_host: RanksPerHost) -> float:
    """Return the bytes that the busiest host sends over its link, for each byte of the tensor.

    On one host every rank counts as a host: the link is its way to memory. MPI is taken to be hierarchical.
    """
    size = sum(ranks_per_host)
    per_link = ranks_per_host if len(ranks_per_host) > 1 else [1] * size
    hosts, most = len(per_link), max(per_link)
    if algorithm == "ring":  # crosses each link once, if hosts hold neighbours
        return 2 * (size - 1) / size
    if algorithm == "all_to_all":  # every rank of a host sends over the one link
        return 2 * most * (size - most) / size
    if algorithm == "halving_doubling":  # so here; ranks beyond a power of two send and get everything
        power, extra = _power_of_two(size)
        return 2 * most * max(0, power - most) / power + min(most, extra)
    return 2 * (hosts - 1) / hosts


def num_steps(algorithm: str, ranks_per_host: RanksPerHost) -> int:
    """Return how many messages, or barriers, come one after the other."""
    size, hosts = sum(ranks_per_host), len(ranks_per_host)
    if algorithm in ("ring", "all_to_all"):
        return 2 * (size - 1)
    if algorithm == "halving_doubling":
        power, extra = _power_of_two(size)
        return 2 * (power.bit_length() - 1) + 2 * (extra > 0)
    return math.ceil(math.log2(size if hosts == 1 else hosts))


def _power_of_two(size: int) -> tuple[int, int]:
    """Return the largest power of two that is not above `size`, and the rest."""
    power = 1 << (size.bit_length() - 1)
    return power, size - power
