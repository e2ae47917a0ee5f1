"""Ring all-reduce: every rank exchanges messages with its two neighbours only, and sends no byte twice.

After n - 1 steps of passing partial sums on, rank r holds the finished chunk r + 1; after n - 1 more steps of
passing finished chunks on, everyone holds all. For 3 ranks and chunks a b c (capital: finished):

    step           rank 0 sends   rank 1 sends   rank 2 sends
    1 (reduce)     a0             b1             c2
    2 (reduce)     c2+c0          a0+a1          b1+b2
    3 (gather)     B              C              A
    4 (gather)     A              B              C
"""

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.transport.messages.link import Link, even_ranges
from mpisgd.transport.torch_reduction import combine

__all__ = ["ring"]


def ring(link: Link, flat: Tensor, op: ReduceOp) -> None:
    """Combine `flat` [n] over the ranks, in place.

    Cost: sends 2 (size - 1) / size * n elements in 2 (size - 1) messages per rank.
    Source: Patarasuk and Yuan 2009; brought to deep learning by Baidu's ring all-reduce, 2017.
    """
    chunks = [flat[start:stop] for start, stop in even_ranges(flat.numel(), link.size)]
    scratch = torch.empty_like(chunks[-1])  # the last one is a longest one
    after, before = (link.rank + 1) % link.size, (link.rank - 1) % link.size
    for step in range(link.size - 1):
        mine = chunks[(link.rank - step) % link.size]
        theirs = chunks[(link.rank - step - 1) % link.size]
        partial = scratch[: theirs.numel()]
        link.exchange(mine, after, partial, before)
        combine(op, theirs, partial)
    for step in range(link.size - 1):
        mine = chunks[(link.rank + 1 - step) % link.size]
        theirs = chunks[(link.rank - step) % link.size]
        link.exchange(mine, after, theirs, before)
