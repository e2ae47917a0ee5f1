"""`op=mpisgd.Adasum`: the gradients of the ranks are added as far as they are orthogonal.

Source: Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation".
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import cut_by
from mpisgd.collectives.algorithms.adasum import adasum
from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.compress.compressor import BucketLayout, BucketReducer, Compressor, Traits
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.methods.adasum import paper
from mpisgd.methods.coding import Coding
from mpisgd.methods.paper_kit import Paper

__all__ = ["AdaptiveSum", "Adasum"]


@dataclass(frozen=True, repr=False)
class AdaptiveSum(Compressor):
    """For `DistributedOptimizer(op=mpisgd.Adasum)`: each parameter's gradients are combined adaptively.

    Of two gradients a and b

        (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

    their sum where they are orthogonal, their mean where they are parallel, and either where the other is
    zero; of more ranks pair by pair: the 1st with the 2nd, the 3rd with the 4th, then these results. Any
    number of ranks. The learning rate need not grow with them.

    It combines gradients. Horovod's optimizer lets each rank step by itself and combines the steps, which is
    the same for SGD without momentum; for that, use `mpisgd.horovod`.

    Cost: sends size - 1 times the gradients' bytes, and takes the memory of `size` buckets.
    """

    def __repr__(self) -> str:
        return "Adasum"

    @cached_property
    def traits(self) -> Traits:
        """What gradients have in common counts once."""
        return Traits(is_additive=False, replaces_op="Adasum")

    def reducer(self, layout: BucketLayout) -> BucketReducer:
        """Return a reducer that combines the gradients of a bucket, each by itself."""
        return _AdasumReducer(layout)

    def coding(self) -> Coding:
        """Return what compressing costs beside the bytes, for `plan`.

        The gradients of all ranks go to all ranks, which combine them.
        """
        return Coding(element_s=5e-9, copies=0.0)

    def paper(self) -> Paper[Any]:
        """See `Compressor`."""
        return paper.Adasum()


Adasum = AdaptiveSum()
"""The adaptive sum, for `op=` of `DistributedOptimizer`: each parameter's gradients are combined adaptively.

Of two gradients a and b

    (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

which is their sum where they are orthogonal, and their mean where they are parallel. Any number of ranks; the
learning rate need not grow with it.

Cost: sends size - 1 times the gradients' bytes, and takes the memory of `size` buckets.

Source: Maleki et al. 2020, "Scaling Distributed Training with Adaptive Summation".
"""


class _AdasumReducer(BucketReducer):
    """Gathers a bucket from all ranks, and combines it on each of them. Keeps nothing."""

    def __init__(self, layout: BucketLayout) -> None:
        self._lengths = [shape.numel() for shape in layout.shapes]
        self._nbytes = layout.numel * layout.dtype.itemsize

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Replace every gradient by the adaptive sum of everyone's; see `BucketReducer.reduce`."""
        everyone = torch.empty(group.size, bucket.numel(), dtype=bucket.dtype, device=bucket.device)
        all_gather_into_tensor(everyone, bucket, group)
        theirs = torch.split(everyone, self._lengths, dim=1)
        for mine, rows in zip(cut_by(bucket, self._lengths), theirs, strict=True):
            mine.copy_(adasum(list(rows)))

    def bytes_on_the_wire(self, size: int) -> int:
        """Return size - 1 times the bucket's bytes."""
        return (size - 1) * self._nbytes
