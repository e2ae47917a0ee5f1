"""`PieceUpdate`: lets an elementwise optimizer update each piece as soon as its gradient is combined."""

import torch
from torch import Tensor

from mpisgd.sharding.elementwise import single_step
from mpisgd.sharding.masters import RefreshMasters
from mpisgd.sharding.offload.state_store import StateStore
from mpisgd.sharding.piece import Piece

__all__ = ["PieceUpdate"]

BATCH_BYTES = 2**18  # of gradients that are updated with together, if they are small


class PieceUpdate:
    """A `Receiver` that updates parameters while the sum is in the cache.

    Args:
        optimizer: whose groups have no parameters meanwhile.
        state: what it has as its state, if that need not be in memory all the time.
    """

    in_place = False

    def __init__(self, optimizer: torch.optim.Optimizer, state: StateStore | None = None) -> None:
        self._optimizer, self._state = optimizer, state
        self._step = single_step(optimizer)
        self._refresh_masters = RefreshMasters()
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._used: dict[torch.dtype, int] = {}
        self._batch: list[Piece] = []
        self._num_bytes = 0
        self._error: Exception | None = None

    def buffer_for(self, piece: Piece, mine: Tensor | None) -> Tensor:
        """See `Receiver`."""
        dtype, numel = piece.dtype, piece.tensor.numel()
        buffer = self._buffers.get(dtype)
        if buffer is None or numel > buffer.numel():
            least = 2 * BATCH_BYTES // dtype.itemsize
            self._buffers[dtype] = buffer = torch.zeros(max(numel, least), dtype=dtype)
        if self._used.get(dtype, 0) + numel > buffer.numel():
            self.finish()
        used = self._used.get(dtype, 0)
        self._used[dtype] = used + numel
        return buffer[used : used + numel]

    def received(self, piece: Piece, grad: Tensor) -> None:
        """Update a piece, or leave it for the next ones if it is small."""
        piece.grad = grad
        self._batch.append(piece)
        self._num_bytes += piece.tensor.nbytes
        if self._num_bytes >= BATCH_BYTES:
            self.finish()

    def finish(self) -> None:
        """Update what was left. After an error nothing is updated, but the other ranks must not wait."""
        batch, self._batch = self._batch, []
        self._used.clear()
        self._num_bytes = 0
        if batch and self._error is None:
            try:
                self._update(batch)
            except Exception as error:
                self._error = error
        for piece in batch:
            piece.grad = None

    @torch.no_grad()
    def _update(self, batch: list[Piece]) -> None:
        groups = self._optimizer.param_groups
        # Where a piece is a parameter, every rank sees that this one has a gradient; so does its owner.
        seen = [piece.tensor.grad for piece in batch]
        self._refresh_masters(batch)
        for piece in batch:
            piece.show_grad()
            groups[piece.group]["params"].append(piece.tensor)
        try:
            self._step(self._optimizer)
            if self._state is not None:
                self._state.release([piece.tensor for piece in batch])
        finally:
            for group in groups:
                group["params"].clear()
            for piece, grad in zip(batch, seen, strict=True):
                piece.tensor.grad = grad
        for piece in batch:
            piece.write_back()

    def raise_error(self) -> None:
        """Raise what the optimizer has raised."""
        if self._error is not None:
            raise self._error
