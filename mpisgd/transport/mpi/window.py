"""`MpiWindow`: memory of each rank that the others read and write by MPI's one-sided calls, passive target.

The epoch of every rank with every other lasts as long as the window (`MPI_Win_lock_all`), so each call may
come at any time. Counts stay below a C int: what is longer goes in pieces.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from mpi4py import MPI
from torch import Tensor

from mpisgd.transport.mpi.calls import mpi_call
from mpisgd.transport.mpi.communicator import Communicator
from mpisgd.transport.mpi.datatypes import ELEMENT_TYPES, address, native

__all__ = ["MpiWindow"]

PIECE_BYTES = 2**28
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class MpiWindow:
    """The memory of all ranks of a communicator, of which each has given a flat CPU tensor. Collective.

    Args:
        communicator: the ranks, whose numbers are those of the methods.
        memory: [n], contiguous; must live as long as the window.

    Attributes:
        sent_bytes: payload that this rank has read from or written to others.
    """

    @mpi_call("Win_create", blocks=True)
    def __init__(self, communicator: Communicator, memory: Tensor) -> None:
        self.calls: Counter[str] = Counter()
        self.sent_bytes = 0
        self.is_revoked = communicator.is_revoked
        self._memory = memory
        self._itemsize = memory.element_size()
        mine = address(memory) if memory.numel() else None
        self._win = MPI.Win.Create(mine, self._itemsize, MPI.INFO_NULL, communicator.comm)
        self._win.Lock_all(MPI.MODE_NOCHECK)

    @mpi_call("Put")
    def put(self, flat: Tensor, dst: int, start: int) -> None:
        """Write `flat` to elements `start` and following of `dst`; leave it alone until `flush`."""
        for piece, at in self._pieces(flat, start):
            self._win.Put([address(piece), piece.nbytes, MPI.BYTE], dst, (at, piece.nbytes, MPI.BYTE))

    @mpi_call("Get")
    def get(self, out: Tensor, src: int, start: int) -> None:
        """Read into `out` [n], which is complete after `flush`."""
        for piece, at in self._pieces(out, start):
            self._win.Get([address(piece), piece.nbytes, MPI.BYTE], src, (at, piece.nbytes, MPI.BYTE))

    @mpi_call("Accumulate")
    def accumulate(self, flat: Tensor, op: str, dst: int, start: int) -> None:
        """Combine `flat` into elements of `dst`, each atomically; leave it alone until `flush`."""
        mpi_op, kind = native(op, flat.dtype)
        for piece, at in self._pieces(flat, start):
            count = piece.numel()
            self._win.Accumulate([address(piece), count, kind], dst, (at, count, kind), mpi_op)

    @mpi_call("Get_accumulate")
    def get_accumulate(self, flat: Tensor, out: Tensor, op: str, dst: int, start: int) -> None:
        """The same, and read into `out` what was there before each."""
        mpi_op, kind = native(op, flat.dtype)
        for (piece, at), (before, _) in zip(self._pieces(flat, start), self._pieces(out, start), strict=True):
            count = piece.numel()
            self._win.Get_accumulate(
                [address(piece), count, kind],
                [address(before), count, kind],
                dst,
                (at, count, kind),
                mpi_op,
            )

    @mpi_call("Compare_and_swap")
    def compare_and_swap(self, expected: Tensor, desired: Tensor, out: Tensor, dst: int, start: int) -> None:
        """Write each element of `desired` where that of `expected` is found, bit by bit; `out`: what was."""
        kind = ELEMENT_TYPES[BITS[self._itemsize]]
        for i in range(out.numel()):
            new, old, was = (address(tensor[i : i + 1]) for tensor in (desired, expected, out))
            self._win.Compare_and_swap([new, 1, kind], [old, 1, kind], [was, 1, kind], dst, start + i)

    @mpi_call("Accumulate")
    def replace(self, flat: Tensor, dst: int, start: int) -> None:
        """Write as `put` does, each element atomically with regard to the other atomic calls."""
        kind = ELEMENT_TYPES[flat.dtype]
        self._win.Accumulate(
            [address(flat), flat.numel(), kind], dst, (start, flat.numel(), kind), MPI.REPLACE
        )

    @mpi_call("Win_flush", blocks=True)
    def flush(self, dst: int) -> None:
        """Return when all that this rank has begun with `dst` is complete there and here."""
        self._win.Flush(dst)

    @mpi_call("Win_flush_local", blocks=True)
    def flush_local(self, dst: int) -> None:
        """Return when the tensors that this rank has given to calls with `dst` may be used again."""
        self._win.Flush_local(dst)

    @mpi_call("Win_flush_all", blocks=True)
    def flush_all(self) -> None:
        """The same for all ranks."""
        self._win.Flush_all()

    @mpi_call("Win_sync")
    def sync(self) -> None:
        """Let this rank's loads and stores see what others have written, and the other way round."""
        self._win.Sync()

    @mpi_call("Win_free", blocks=True)
    def free(self) -> None:
        """Free the window. Collective."""
        self._win.Unlock_all()
        self._win.Free()

    def _pieces(self, flat: Tensor, start: int) -> Iterator[tuple[Tensor, int]]:
        """Yield the pieces of a transfer with the element of the window at which each begins."""
        self.sent_bytes += flat.nbytes
        step = PIECE_BYTES // self._itemsize
        for first in range(0, flat.numel(), step):
            yield flat[first : first + step], start + first
