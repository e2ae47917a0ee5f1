"""`AllReduceAtOnce`: every rank combines the whole of a small message for itself.

Reading more takes less time than one more barrier: the consistency check is the only one.
"""

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import flattened
from mpisgd.dtypes import ReduceOp
from mpisgd.interfaces.host_transport import Steps
from mpisgd.transport.shm.staging import copy_bytes
from mpisgd.transport.shm.staging_memory import StagingMemory
from mpisgd.transport.torch_reduction import combine_in_rank_order, divide

__all__ = ["AT_ONCE_BYTES", "AllReduceAtOnce", "goes_at_once"]

# Below this every rank adds up everything.
AT_ONCE_BYTES = 2**19
READ_BY_EACH_BYTES = 2**20


def goes_at_once(nbytes: int, size: int) -> bool:
    """Return whether every rank of `size` combines a message of so many bytes for itself."""
    return nbytes <= AT_ONCE_BYTES and nbytes * size <= READ_BY_EACH_BYTES


class AllReduceAtOnce:
    """The all-reduce of small messages of one form. See `mpisgd.interfaces.host_transport.ReductionAtOnce`.

    Args:
        shm: the staging memory of the host.
        numel: of each rank's message.
        dtype: any reducible one.
        op: elementwise combination.

    Cost: every rank reads everyone's message.
    """

    def __init__(self, shm: StagingMemory, numel: int, dtype: torch.dtype, op: ReduceOp) -> None:
        self._shm = shm
        self._op = op
        self._nbytes = numel * dtype.itemsize
        self._form = numel, dtype
        self._sums = shm.small_sums(numel, dtype) if op in (ReduceOp.SUM, ReduceOp.AVG) else (None, None)

    def begin(self, tensor: Tensor) -> None:
        """Write the elements of `tensor` for the others."""
        copy_bytes(self._shm.next_addresses()[self._shm.rank], tensor.data_ptr(), self._nbytes)

    def finish(self, tensor: Tensor) -> None:
        """Combine everyone's into `tensor`."""
        shm, op = self._shm, self._op
        shm.swap_buffers()
        if (total := self._sums[shm.turn]) is None:
            combine_in_rank_order(shm.pieces(*self._form), op, out=flattened(tensor))
            return
        copy_bytes(tensor.data_ptr(), total.address(), self._nbytes)
        if op is ReduceOp.AVG:
            divide(tensor.detach(), shm.size)

    def steps(self, tensor: Tensor) -> Steps:
        """Do both as the steps of an operation."""
        self.begin(tensor)
        yield
        self.finish(tensor)
