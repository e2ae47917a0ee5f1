"""Reduce to one rank along a binomial tree, and broadcast the result along the same tree.

The obvious algorithm, to compare with: the whole tensor travels 2 log2(size) hops one after another.
"""

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.transport.messages.link import Link
from mpisgd.transport.torch_reduction import combine

__all__ = ["reduce_broadcast"]


def reduce_broadcast(link: Link, flat: Tensor, op: ReduceOp) -> None:
    """Combine `flat` [n] over the ranks, in place.

    Cost: every rank but 0 sends n elements to its parent, and every rank n to each of its children.
    """
    parent, children = family(link.rank, link.size)
    theirs = torch.empty_like(flat) if children else flat
    for child in children:  # the nearest has the smallest subtree and is ready first
        link.recv(theirs, child)
        combine(op, flat, theirs)
    if parent is not None:
        link.send(flat, parent)
        link.recv(flat, parent)
    for child in reversed(children):  # the farthest has the largest subtree and must start first
        link.send(flat, child)


def family(rank: int, size: int) -> tuple[int | None, list[int]]:
    """Return (parent, children) of `rank` in the binomial tree with root 0, nearest child first."""
    children = []
    distance = 1
    while distance < size and not rank & distance:
        if rank + distance < size:
            children.append(rank + distance)
        distance *= 2
    return (rank - distance if rank else None), children
