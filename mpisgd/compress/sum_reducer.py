"""`SumReducer`: the sum of dense gradients, by the algorithm that is fastest for what backward has made."""

from torch import Tensor

from mpisgd.collectives.all_reduce import choose_algorithm, reduce_tensor, transport_named, transports_for
from mpisgd.collectives.dispatch import transport_for
from mpisgd.compress.compressor import BucketReducer
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.interfaces.host_transport import Region

__all__ = ["SumReducer"]


class SumReducer(BucketReducer):
    """Sums a bucket where it lies. Keeps nothing.

    Args:
        nbytes: of the bucket.
        in_shared_memory: whether the bucket lies in the shared memory of hosts; the same on all ranks.
        region: that memory; None on a rank that is alone on its host.
    """

    def __init__(self, nbytes: int, *, in_shared_memory: bool = False, region: Region | None = None) -> None:
        self._nbytes = nbytes
        self._in_shared_memory = in_shared_memory
        self._region = region

    def reduce(self, bucket: Tensor, group: Group, op: ReduceOp) -> None:
        """Sum the bucket in the memory of the host, or as any tensor; see `BucketReducer.reduce`."""
        transport = transport_for(group, "all_reduce", bucket.dtype, bucket.nbytes)
        if self._in_shared_memory and transport is not None:
            transport.all_reduce_now(bucket, op, self._region)
        else:
            reduce_tensor(group, bucket, op, _algorithm(group, bucket))

    def bytes_on_the_wire(self, size: int) -> int:
        """Return 2 (size - 1) / size of the bucket's bytes: a reduce-scatter and an all-gather."""
        return 2 * (size - 1) * self._nbytes // size


def _algorithm(group: Group, flat: Tensor) -> str:
    """Choose as for any tensor, but for one thing: what backward has just made has left the caches by now."""
    chosen = choose_algorithm(group, "auto", flat)
    transport = transport_named(group, chosen)
    if transport is None or transport.suits_uncached(flat):
        return chosen
    return next((found.name for found in transports_for(group, flat) if found.suits_uncached(flat)), chosen)
