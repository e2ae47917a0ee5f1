"""Which rank of a host updates which parameter: a plan as plain data, the same on every rank."""

from collections.abc import Sequence

__all__ = ["assign"]


def assign(sizes: Sequence[int], loads: Sequence[int]) -> list[int]:
    """Return the owner of each parameter, such that the ranks of a host have about equally much to do.

    A parameter has one owner: optimizers that look at a tensor as a whole (its norm, its factors) see all of
    it. So the largest tensor limits how evenly the work can be divided.

    Args:
        sizes: of the parameters, in bytes.
        loads: what each rank has already.

    Source: longest processing time first, Graham 1969: at most 4/3 of the best possible largest load, where
    nobody had anything before.
    """
    loads = list(loads)
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        owners[index] = min(range(len(loads)), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += sizes[index]
    return owners
