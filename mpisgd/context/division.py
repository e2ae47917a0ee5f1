"""Which part of a sequence each rank has, and which keys the queries of a part see. Plain data.

With a causal mask the first queries see few keys and the last ones many. So a sequence has twice as many
chunks as there are ranks, and each rank has one from the front and one from the back: all compute as much.
Four ranks:

    chunk   0  1  2  3  4  5  6  7
    rank    0  1  2  3  3  2  1  0

Source: torch's context parallelism; Brandon et al. 2023, "Striped Attention", for the balance.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Block", "block_of", "own_part", "positions"]


class Block(NamedTuple):
    """Which of a rank's queries meet which keys of a source, in the order in which both have them.

    Attributes:
        rows: of the queries.
        columns: of the keys.
        is_causal: whether a query sees only the keys up to its own place in the part.
    """

    rows: slice
    columns: slice
    is_causal: bool


def own_part(tensor: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Return a copy of the chunks of rank `rank` of `size`; the tensor itself where there is one rank.

    Args:
        tensor: whose length along `dim` divides by 2 * `size`, if there are several ranks.
        dim: along which.
        rank: whose.
        size: of how many.
    """
    if size == 1:
        return tensor
    chunks = tensor.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def positions(length: int, rank: int, size: int) -> list[int]:
    """Return the places in a sequence of `length` that rank `rank` of `size` has."""
    return list(own_part(torch.arange(length), 0, rank, size))


def block_of(rank: int, source: int, num_rows: int, num_columns: int, is_causal: bool) -> Block:
    """Return the block of scores that rank `rank` computes with the keys of rank `source`; never empty.

    A part is sorted by places, so within a rank a causal mask is the usual one. The chunks of a source
    before this rank lie around those of this rank: all queries see its front, none sees its back. Those of
    a source after it lie between: the queries at the back see both, those at the front none.

    Args:
        rank: whose queries.
        source: whose keys.
        num_rows: of queries that a rank has.
        num_columns: of keys that a rank has; as many, if causal.
        is_causal: whether a query sees only the keys up to its own place in the sequence.
    """
    everything = Block(slice(0, num_rows), slice(0, num_columns), is_causal)
    if not is_causal or source == rank:
        return everything
    half = num_rows // 2
    if source < rank:
        return Block(everything.rows, slice(0, half), is_causal=False)
    return Block(slice(half, num_rows), everything.columns, is_causal=False)
