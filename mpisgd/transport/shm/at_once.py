"""Small messages, for which the consistency check is the only barrier.

In an all-reduce every rank combines the whole for itself: reading more takes less time than one more barrier.
"""

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import flattened
from mpisgd.dtypes import ReduceOp
from mpisgd.interfaces.host_transport import Steps
from mpisgd.transport.shm.staging import copy_bytes
from mpisgd.transport.shm.staging_memory import StagingMemory
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["AT_ONCE_BYTES", "AllGatherAtOnce", "AllReduceAtOnce", "BroadcastAtOnce", "goes_at_once"]

# Below this every rank adds up everything.
AT_ONCE_BYTES = 2**19
READ_BY_EACH_BYTES = 2**20


def goes_at_once(nbytes: int, size: int) -> bool:
    """Return whether every rank of `size` combines a message of so many bytes for itself."""
    return nbytes <= AT_ONCE_BYTES and nbytes * size <= READ_BY_EACH_BYTES


class AllReduceAtOnce:
    """The all-reduce of small messages of one form. See `mpisgd.interfaces.host_transport.AtOnce`.

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
        self._mine = [addresses[shm.rank] for addresses in shm.addresses]
        self._nbytes = numel * dtype.itemsize
        self._form = numel, dtype
        adds, averages = op in (ReduceOp.SUM, ReduceOp.AVG), op is ReduceOp.AVG
        self._sums = shm.small_sums(numel, dtype, averages=averages) if adds else (None, None)

    def begin(self, tensor: Tensor) -> None:
        """Write the elements of `tensor` for the others."""
        copy_bytes(self._mine[self._shm.turn ^ 1], tensor.data_ptr(), self._nbytes)

    def finish(self, tensor: Tensor) -> None:
        """Combine everyone's into `tensor`."""
        shm = self._shm
        shm.swap_buffers()
        if (total := self._sums[shm.turn]) is None:
            combine_in_rank_order(shm.pieces(*self._form), self._op, out=flattened(tensor))
            return
        total.add()
        copy_bytes(tensor.data_ptr(), total.address, self._nbytes)

    def steps(self, tensor: Tensor) -> Steps:
        """Do both as the steps of an operation."""
        self.begin(tensor)
        yield
        self.finish(tensor)


class BroadcastAtOnce:
    """The broadcast of small messages of one size.

    Args:
        shm: the staging memory of the host.
        nbytes: of the message.
        root: whose it is.
    """

    def __init__(self, shm: StagingMemory, nbytes: int, root: int) -> None:
        self._shm = shm
        self._nbytes = nbytes
        self._is_root = shm.rank == root
        self._of_root = [addresses[root] for addresses in shm.addresses]

    def begin(self, tensor: Tensor) -> None:
        """Write the elements of root's `tensor` for the others."""
        if self._is_root:
            copy_bytes(self._of_root[self._shm.turn ^ 1], tensor.data_ptr(), self._nbytes)

    def finish(self, tensor: Tensor) -> None:
        """Copy them into everyone's."""
        shm = self._shm
        shm.swap_buffers()
        if not self._is_root:
            copy_bytes(tensor.data_ptr(), self._of_root[shm.turn], self._nbytes)


class AllGatherAtOnce:
    """The all-gather of small messages of one size into one tensor.

    Args:
        shm: the staging memory of the host.
        nbytes: of each rank's message.
    """

    def __init__(self, shm: StagingMemory, nbytes: int) -> None:
        self._shm = shm
        self._nbytes = nbytes
        self._mine = [addresses[shm.rank] for addresses in shm.addresses]

    def begin(self, tensors: tuple[Tensor, Tensor]) -> None:
        """Write the elements of the second of (output, input) for the others."""
        copy_bytes(self._mine[self._shm.turn ^ 1], tensors[1].data_ptr(), self._nbytes)

    def finish(self, tensors: tuple[Tensor, Tensor]) -> None:
        """Copy everyone's into the first."""
        shm, nbytes = self._shm, self._nbytes
        shm.swap_buffers()
        out = tensors[0].data_ptr()
        for address in shm.addresses[shm.turn]:
            copy_bytes(out, address, nbytes)
            out += nbytes
