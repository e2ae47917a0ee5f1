"""`SumReducer`: a bucket whose gradients are summed as they are, where the bucket lies."""

from collections.abc import Sequence

from torch import Tensor

from mpisgd.compress.compressor import BucketReducer
from mpisgd.compress.dense_sum import reduce_gradient
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.transport.shm.reduction import reduce_to_owners
from mpisgd.transport.shm.region import Region

__all__ = ["OwnedBucket", "SumReducer", "reduce_to_their_owners"]

# What a bucket brings to its owner: its memory, the shared memory that this is, and the owner's rank.
OwnedBucket = tuple[Tensor, Region | None, int]


class SumReducer(BucketReducer):
    """Sums a bucket without compression. Keeps nothing.

    Args:
        nbytes: of the bucket.
        in_shared_memory: whether the bucket lies in the shared memory of hosts; the same on all ranks.
        region: that memory; None on a rank that is alone on its host.
    """

    def __init__(self, nbytes: int, *, in_shared_memory: bool = False, region: Region | None = None) -> None:
        self._nbytes = nbytes
        self.in_shared_memory = in_shared_memory
        self.region = region

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Sum the bucket in the memory of the host, or as any tensor; see `BucketReducer.reduce`."""
        transport = group.shm or group.internode
        if self.region is not None and transport is not None:
            transport.all_reduce_region(self.region, op)
        elif self.in_shared_memory and group.internode is not None:
            group.internode.all_reduce_now(bucket, op)  # to the other hosts' ranks it is the same
        else:
            reduce_gradient(group, bucket, op)

    def bytes_on_the_wire(self, size: int) -> int:
        """Return 2 (size - 1) / size of the bucket's bytes: a reduce-scatter and an all-gather."""
        return 2 * (size - 1) * self._nbytes // size


def reduce_to_their_owners(buckets: Sequence[OwnedBucket], group: Group, op: ReduceOp) -> None:
    """Reduce each bucket into its owner's memory: half of an all-reduce, on one host, inside the queue.

    There is no barrier at the end: the ranks must synchronize before one writes into a bucket again.
    """
    shm = group.shm
    assert shm is not None
    # Before the regions: these have barriers, and would wait for a rank that still reduces one of its own.
    staged = [(flat, owner) for flat, region, owner in buckets if region is None]
    shm.run_steps(reduce_to_owners(shm, [flat for flat, _ in staged], [owner for _, owner in staged], op))
    for _, region, owner in buckets:
        if region is not None:
            shm.reduce_region(region, op, owner)
