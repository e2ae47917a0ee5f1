"""`TreeSum`: the gradients of all micro-batches, added along one tree, whatever the number of ranks.

A step has M micro-batches, the leaves. Each of n ranks has M / n of them that follow each other, which are
the leaves of a subtree. It adds these up by itself, see `mpisgd.gradients.micro_batches`; then the ranks add
up what they have, neighbours first:

    leaf        0     1     2     3     4     5     6     7
                +-----+     +-----+     +-----+     +-----+
    4 ranks     rank 0      rank 1      rank 2      rank 3       so far each by itself
                +-----------+           +-----------+
    2 ranks     rank 0                  rank 1
                +-----------------------+
    1 rank      the sum

Floating-point addition is commutative, so the same pairs give the same bits. Zeros are the exception that
counts: a gradient that is missing is left out within a rank and is 0.0 between ranks, and -0.0 + 0.0 is 0.0.
So every zero of the result becomes 0.0.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mpisgd.collectives.algorithms.halving_doubling import sum_along_tree
from mpisgd.collectives.dispatch import link_of
from mpisgd.compress.compressor import BucketLayout, BucketReducer, Compressor, Traits
from mpisgd.core.group import Group
from mpisgd.dtypes import FLOATING, ReduceOp
from mpisgd.errors import UnsupportedTensor
from mpisgd.transport.torch_reduction import divide

__all__ = ["TreeSum"]


@dataclass(frozen=True, repr=False)
class TreeSum(Compressor):
    """Sends gradients as they are, and adds them in an order of its own.

    Attributes:
        num_micro_batches: of all ranks in a step, for a mean; 1: their sum.
    """

    num_micro_batches: int

    def __repr__(self) -> str:
        return "reproducible='ranks'"

    @cached_property
    def traits(self) -> Traits:
        """What was divided by the number of micro-batches is no micro-batch's gradient any more."""
        return Traits(is_additive=False, replaces_op=repr(self))

    def changes(self, dtype: torch.dtype) -> bool:
        """Return True: no bucket may be added in another order."""
        return True

    def reducer(self, layout: BucketLayout) -> BucketReducer:
        """Return the reducer of a bucket.

        Raises:
            UnsupportedTensor: see `check`.
        """
        self.check(layout.dtype, layout.device)
        return _TreeReducer(self, layout)

    def check(self, dtype: torch.dtype, device: torch.device, *, is_sparse: bool = False) -> None:
        """Raise UnsupportedTensor where a gradient like this is not added along the tree."""
        if dtype not in FLOATING or device.type != "cpu" or is_sparse:
            what = "sparse" if is_sparse else f"{dtype} on {device.type}"
            raise UnsupportedTensor(
                f"DistributedOptimizer: {self!r} adds dense gradients of real numbers on the CPU, and one is "
                f"{what}"
            )

    def finish(self, total: Tensor) -> None:
        """Make of a sum over all micro-batches what the optimizer gets."""
        if self.num_micro_batches > 1:
            divide(total, self.num_micro_batches)
        total.add_(0.0)


class _TreeReducer(BucketReducer):
    """Adds up the buckets of the ranks. Keeps nothing."""

    def __init__(self, tree: TreeSum, layout: BucketLayout) -> None:
        self._tree = tree
        self._nbytes = layout.numel * layout.dtype.itemsize

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Add up; see `BucketReducer.reduce`."""
        sum_along_tree(link_of(group, "gradients"), bucket, self._tree.finish, framed=group.spans_hosts)

    def bytes_on_the_wire(self, size: int) -> int:
        """Return 2 (size - 1) / size of the bucket's bytes."""
        return 2 * (size - 1) * self._nbytes // size
