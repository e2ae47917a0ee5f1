"""`StreamedPieces`: what the optimizer updates of parameters that are in files, chunk by chunk."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.gradients.fusion_buffer import StridedLayout, layout_of
from mpisgd.sharding.division import Member
from mpisgd.sharding.layerwise.parameter_unit import Chunk, Unit
from mpisgd.sharding.layerwise.streamed_parameters import GRADIENT, VALUES, StreamedParameters
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.piece import Piece, Receiver

__all__ = ["StreamedPieces"]


class _Placed(NamedTuple):
    """A piece, the parameter of which it is a part, and where it begins in its chunk."""

    piece: Piece
    param: Tensor
    start: int

    def part(self, chunk: Tensor) -> Tensor:
        """Return the part of a chunk's memory that belongs to the piece."""
        return chunk[self.start : self.start + self.piece.members[0].numel]


class StreamedPieces:
    """The pieces of this rank; each is a part of one parameter.

    Between steps a piece has no memory, only its size.

    Args:
        named: the parameters of the optimizer, with names.
        groups: its groups.
        streamed: where the parameters are.

    Attributes:
        owners: all ranks of the group.
        pieces: of this rank, in the order of an update.
        layouts: how each parameter lies in memory.
        divided: see `Pieces`.
    """

    divided = True

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        groups: Sequence[Mapping[str, Any]],
        streamed: StreamedParameters,
    ) -> None:
        self._streamed = streamed
        self.owners = Owners(streamed.group, of_host=False)
        self.layouts: list[StridedLayout] = [layout_of(param) for _, param in named]
        self._index_of = {param: index for index, (_, param) in enumerate(named)}
        self._group_of = {p: place for place, options in enumerate(groups) for p in options["params"]}
        self._chunks = [
            (chunk, list(self._placed(unit, chunk))) for unit in streamed.units[::-1] for chunk in unit.chunks
        ]
        self.pieces = [placed.piece for _, of_chunk in self._chunks for placed in of_chunk]

    def _placed(self, unit: Unit, chunk: Chunk) -> Iterator[_Placed]:
        for member in unit.members(chunk):
            param = unit.params[member.param]
            if param in self._index_of:
                whole = Member(self._index_of[param], member.first, member.numel, 0)
                tensor = torch.nn.Parameter(without_memory(member.numel, param.dtype))
                yield _Placed(Piece(tensor, self._group_of[param], [whole]), param, member.at)

    def placed(self, piece: Piece, entries: Mapping[str, Any]) -> dict[str, Any]:
        """See `Pieces`: all is on the CPU."""
        return dict(entries)

    def hand_over(self, receiver: Receiver) -> None:
        """See `Pieces`: chunk by chunk, in the order in which gradients come."""
        values, gradients = self._streamed.values, self._streamed.gradients
        for chunk, pieces in self._present():
            memory, gradient = values[chunk.key][VALUES], gradients[chunk.key][GRADIENT]
            for placed in pieces:
                placed.piece.tensor.data = placed.part(memory)
                receiver.received(placed.piece, placed.part(gradient))
            receiver.finish()
            for placed in pieces:
                tensor = placed.piece.tensor
                tensor.data = without_memory(tensor.numel(), tensor.dtype)
            values.release([chunk.key])
            gradients.release([chunk.key], changed=False)
        values.end_step()

    def each_gradient(self, action: Callable[[Tensor], Any], *, changes: bool) -> None:
        """Read the gradients of all pieces that have one, and write those that change."""
        gradients = self._streamed.gradients
        for chunk, pieces in self._present():
            memory = gradients[chunk.key][GRADIENT]
            for placed in pieces:
                action(placed.part(memory))
            gradients.release([chunk.key], changed=changes)
        gradients.end_step()

    def _present(self) -> Iterator[tuple[Chunk, list[_Placed]]]:
        """Yield each chunk and its pieces of parameters that have gradients."""
        params = self._streamed.present
        for chunk, of_chunk in self._chunks:
            if here := [placed for placed in of_chunk if placed.param in params]:
                yield chunk, here


def without_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Return [numel] that all lie in one place."""
    return torch.zeros((), dtype=dtype).expand(numel)
