"""All-to-all: every rank owns one part, gets everyone's piece of it, and hands the result to everyone.

The least steps for the least bytes, and the only form in which one owner sees all the pieces at once: it adds
them in rank order, 16-bit floats in float32 with one rounding at the end, although 16 bits travel.
"""

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.transport.messages.link import Link, even_ranges
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["all_to_all", "reduce_own_part"]


def all_to_all(link: Link, flat: Tensor, op: ReduceOp) -> None:
    """Combine `flat` [n], of any reducible dtype, over the ranks, in place; `op` may be AVG.

    Cost: sends 2 (size - 1) / size * n elements in 2 (size - 1) messages per rank.
    """
    parts = [flat[start:stop] for start, stop in even_ranges(flat.numel(), link.size)]
    parts[link.rank].copy_(reduce_own_part(link, parts, op))
    others = [rank for rank in range(link.size) if rank != link.rank]
    link.transfer(
        sends=[(rank, parts[link.rank]) for rank in others],
        receives=[(rank, parts[rank]) for rank in others],
    )


def reduce_own_part(link: Link, parts: list[Tensor], op: ReduceOp) -> Tensor:
    """Return the combination of everyone's part number `link.rank`.

    Args:
        parts: this rank's tensor as one contiguous part per rank; unchanged. All ranks cut alike.

    Cost: sends every part but its own, in size - 1 messages per rank.
    """
    mine = parts[link.rank]
    pieces = [mine if rank == link.rank else torch.empty_like(mine) for rank in range(link.size)]
    others = [rank for rank in range(link.size) if rank != link.rank]
    link.transfer(
        sends=[(rank, parts[rank]) for rank in others],
        receives=[(rank, pieces[rank]) for rank in others],
    )
    return combine_in_rank_order(pieces, op)
