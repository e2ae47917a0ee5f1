"""`Region`: a tensor per rank in shared memory, which is reduced where it lies."""

import torch
from torch import Tensor

from mpisgd.comm.node.segment import Segment

__all__ = ["Region"]


class Region:
    """The same number of elements for every rank of a host, each rank's visible to all.

    Between operations `mine` is an ordinary tensor of this rank. The tensors keep the memory alive.

    Attributes:
        mine: [numel], this rank's.
        everyones: [numel] of each rank, `mine` among them.
    """

    def __init__(self, segment: Segment, rank: int, size: int, numel: int, dtype: torch.dtype) -> None:
        self.everyones: list[Tensor] = [segment.share_as(other, numel, dtype) for other in range(size)]
        self.mine = self.everyones[rank]
