"""What the root gets of each output: which rows come from which rank."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument
from mpisgd.nn.batch_outline import TensorOutline
from mpisgd.nn.row_exchange import RowExchange

__all__ = ["OutputRows", "join_outputs"]


@dataclass(frozen=True)
class OutputRows:
    """What all ranks return of one output.

    Attributes:
        outline: of the root's. Without dimensions, each rank's is one row.
        dim: the dimension that counts rows.
        counts: the rows of each rank.
    """

    outline: TensorOutline
    dim: int
    counts: tuple[int, ...]

    def like(self, device: torch.device) -> Tensor:
        """Return a tensor of this kind that takes no memory."""
        return replace(self.outline, shape=self.outline.shape or (1,)).placeholder(device)

    def by(self, exchange: RowExchange) -> RowExchange:
        """Return the exchange of these rows."""
        return replace(exchange, dim=self.dim)


def join_outputs(
    everyone: Sequence[Sequence[TensorOutline] | None], exchange: RowExchange
) -> list[OutputRows]:
    """Return the rows that come from each rank's outputs, None of a rank that had nothing to do.

    Raises:
        InvalidArgument: they do not fit together; raised on every rank, since all see the same.
    """
    ours = everyone[exchange.root] or ()
    if any(theirs is not None and len(theirs) != len(ours) for theirs in everyone):
        numbers = [None if theirs is None else len(theirs) for theirs in everyone]
        raise _unfit(f"the ranks return different numbers of tensors, {numbers}")
    return [
        _join(place, [None if theirs is None else theirs[place] for theirs in everyone], exchange)
        for place in range(len(ours))
    ]


def _join(place: int, outlines: Sequence[TensorOutline | None], exchange: RowExchange) -> OutputRows:
    ours = outlines[exchange.root]
    assert ours is not None
    dim = exchange.dim if ours.shape else 0
    there = [outline for outline in outlines if outline is not None]
    if any(_without_rows(outline, dim) != _without_rows(ours, dim) for outline in there):
        shapes = [outline and list(outline.shape) for outline in outlines]
        raise _unfit(f"output {place} cannot be joined along dim={dim}, the ranks return {shapes}")
    counts = tuple(0 if outline is None else (outline.shape or (1,))[dim] for outline in outlines)
    return OutputRows(ours, dim, counts)


def _without_rows(outline: TensorOutline, dim: int) -> object:
    """Return the outline without rows, which must be the same on all ranks."""
    shape = list(outline.shape or (1,))
    if not -len(shape) <= dim < len(shape):
        raise _unfit(f"a tensor of shape {shape} has no rows along dim={dim}")
    del shape[dim]
    return shape, outline.dtype


def _unfit(what: str) -> InvalidArgument:
    error = InvalidArgument(f"DataParallel: {what}")
    error.on_every_rank = True
    return error
