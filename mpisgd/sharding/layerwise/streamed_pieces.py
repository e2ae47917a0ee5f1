"""`StreamedPieces`: what the optimizer updates of parameters that are in files, chunk by chunk."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpisgd.gradients.fusion_buffer import Layout, layout_of
from mpisgd.sharding.division import Member
from mpisgd.sharding.layerwise.parameter_unit import Chunk, Unit
from mpisgd.sharding.layerwise.streamed_parameters import StreamedParameters
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.piece import Piece

__all__ = ["Placed", "StreamedPieces"]


class Placed(NamedTuple):
    """A piece, the parameter of which it is a part, and where it begins in its chunk."""

    piece: Piece
    param: Tensor
    start: int

    def part(self, chunk: Tensor) -> Tensor:
        """Return what belongs to the piece of the memory of a chunk."""
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
    """

    def __init__(
        self,
        named: Sequence[tuple[str, Tensor]],
        groups: Sequence[Mapping[str, Any]],
        streamed: StreamedParameters,
    ) -> None:
        self.owners = Owners(streamed.group, of_host=False)
        self.layouts: list[Layout] = [layout_of(param) for _, param in named]
        self._index_of = {param: index for index, (_, param) in enumerate(named)}
        self._group_of = {p: place for place, options in enumerate(groups) for p in options["params"]}
        self._chunks = [
            (chunk, list(self._placed(unit, chunk))) for unit in streamed.units[::-1] for chunk in unit.chunks
        ]
        self.pieces = [placed.piece for _, of_chunk in self._chunks for placed in of_chunk]

    def _placed(self, unit: Unit, chunk: Chunk) -> Iterator[Placed]:
        for member in unit.members(chunk):
            param = unit.params[member.param]
            if param in self._index_of:
                whole = Member(self._index_of[param], member.first, member.numel, 0)
                tensor = torch.nn.Parameter(without_memory(member.numel, param.dtype))
                yield Placed(Piece(tensor, self._group_of[param], [whole]), param, member.at)

    def placed(self, piece: Piece, entries: dict[str, Any]) -> dict[str, Any]:
        """See `DividedParameters.placed`: all is on the CPU."""
        return entries

    def present(self, params: set[Tensor]) -> Iterator[tuple[Chunk, list[Placed]]]:
        """Yield each chunk and its pieces of some of the parameters, in the order in which gradients come."""
        for chunk, of_chunk in self._chunks:
            if here := [placed for placed in of_chunk if placed.param in params]:
                yield chunk, here


def without_memory(numel: int, dtype: torch.dtype) -> Tensor:
    """Return [numel] that all lie in one place."""
    return torch.zeros((), dtype=dtype).expand(numel)
