"""`AllReduceAtOnce`: every rank combines the whole of a small message for itself.

Reading more takes less time than one more barrier: the consistency check is the only one.
"""

import contextvars
import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
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
# From so many ranks on numpy adds up small messages: torch needs a call for each rank, of a microsecond.
FROM_RANKS = 3
MAX_BYTES = 2**13
KEEPS_SETTINGS_IN_CONTEXTS = int(np.__version__.partition(".")[0]) >= 2
NUMPY_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int32: np.int32,
    torch.int64: np.int64,
}
# Of a single column numpy adds up halves; of several it adds row after row.
MIN_COLUMNS = 2


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
        fits = (
            KEEPS_SETTINGS_IN_CONTEXTS
            and shm.size >= FROM_RANKS
            and dtype in NUMPY_DTYPES
            and 0 < self._nbytes <= MAX_BYTES
        )
        sums = op in (ReduceOp.SUM, ReduceOp.AVG)
        self._sums = [_Sum.of(at, numel, dtype) if fits and sums else None for at in shm.addresses]

    def begin(self, address: int) -> None:
        """Write what lies there for the others."""
        copy_bytes(self._shm.next_addresses()[self._shm.rank], address, self._nbytes)

    def finish(self, tensor: Tensor, address: int) -> None:
        """Combine everyone's into the tensor."""
        shm, op = self._shm, self._op
        shm.swap_buffers()
        if (total := self._sums[shm.turn]) is None:
            combine_in_rank_order(shm.pieces(*self._form), op, out=flattened(tensor))
            return
        copy_bytes(address, total.address(), self._nbytes)
        if op is ReduceOp.AVG:
            divide(tensor.detach(), shm.size)

    def steps(self, tensor: Tensor) -> Steps:
        """Do both as the steps of an operation."""
        address = tensor.data_ptr()
        self.begin(address)
        yield
        self.finish(tensor, address)


class _Sum:
    """The messages of all ranks as the rows of a matrix, which numpy adds up in their order.

    The bits are those of `combine_in_rank_order`.
    """

    def __init__(self, rows: "np.ndarray[tuple[int, int], np.dtype[np.generic]]") -> None:
        self._rows = rows
        self._total = np.empty(rows.shape[1], rows.dtype)
        self._address = self._total.ctypes.data
        # numpy warns of overflow and NaN; torch does not, and what lies beside a single number may be any
        # bytes. A context costs a tenth of `np.errstate`.
        context = contextvars.Context()
        context.run(np.seterr, all="ignore")
        self._in_silence: Any = context.run

    @classmethod
    def of(cls, addresses: Sequence[int], numel: int, dtype: torch.dtype) -> "_Sum | None":
        """Return the sum of what lies there; None where it does not lie at equal distances."""
        step = addresses[1] - addresses[0]
        if step <= 0 or list(addresses) != list(range(addresses[0], addresses[-1] + 1, step)):
            return None
        columns, of = max(numel, MIN_COLUMNS), np.dtype(NUMPY_DTYPES[dtype])
        nbytes = addresses[-1] - addresses[0] + columns * of.itemsize
        memory = memoryview((ctypes.c_byte * nbytes).from_address(addresses[0])).cast("B")
        return cls(np.ndarray((len(addresses), columns), of, memory, 0, (step, of.itemsize)))

    def address(self) -> int:
        """Add up, and return where the sum lies until the next one is taken."""
        self._in_silence(np.add.reduce, self._rows, 0, None, self._total)
        return self._address
