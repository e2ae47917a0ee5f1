"""Which gradients exist on some rank: where nobody has one it stays None, as in one process.

Momentum and weight decay then leave the parameter alone. Each rank sends a byte per parameter when all
gradients have been reduced; the ranks' bytes are joined bit by bit.
"""

import torch

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.core.dtypes import ReduceOp
from mpisgd.core.group import Group

__all__ = ["join_kinds"]


def join_kinds(kinds: bytes, group: Group) -> bytes:
    """Return the kinds of gradients (`mpisgd.gradients.kinds`) that the ranks have, joined. Collective.

    Args:
        kinds: of this rank's gradients, those of the same parameters on every rank.
        group: the ranks.
    """
    if not kinds:
        return kinds
    joined = bytearray(kinds)
    all_reduce(torch.frombuffer(joined, dtype=torch.uint8), ReduceOp.BOR, group)
    return bytes(joined)
