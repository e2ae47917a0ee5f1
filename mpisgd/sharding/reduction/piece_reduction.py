"""`PieceReduction`: brings the gradients of a host's ranks, combined, to the pieces that each rank owns.

Large gradients lie where autograd has put them: what belongs to others goes through the staging memory. Small
ones lie in fusion buffers in shared memory, from which the owner of a piece reads everyone's:

    rank 0   stage(1's part 0) | combine own part 0 | stage(1's part 1) | combine own part 1 | ... | small
    rank 1   stage(0's part 0) | combine own part 0 | stage(0's part 1) | combine own part 1 | ... | small

Whoever receives a piece may update parameters with it at once, while it is in the cache.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.gradients.bucket_plan import BucketPlan, BucketSlot
from mpisgd.gradients.in_place_gradient import InPlaceGradient
from mpisgd.interfaces.host_transport import HostMemory, Region, Steps
from mpisgd.sharding.divided_parameters import DividedParameters
from mpisgd.sharding.division import Member
from mpisgd.sharding.piece import Piece, Receiver
from mpisgd.transport.staging_layout import slot_bytes
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["PieceReduction", "Settle", "goes_in_pieces"]


class _Place(NamedTuple):
    """Where the gradient of a parameter travels: in a slot of the plan, from an element on."""

    slot: BucketSlot
    offset: int


class _Part(NamedTuple):
    """A part of a large gradient, at most a slot of the staging memory; in elements."""

    param: int
    first: int
    numel: int
    at: int  # in the piece
    is_last: bool
    start: int  # the byte of the gradient at which it begins
    nbytes: int


class _Source(NamedTuple):
    """Where some elements of a piece are in everyone's fusion buffer."""

    region: Region
    first: int
    numel: int
    at: int  # in the piece


def goes_in_pieces(plan: BucketPlan) -> bool:
    """Return whether all gradients of a plan can be brought to their owners alone; alike on all ranks."""
    return all(
        isinstance(slot.storage, InPlaceGradient) or slot.region is not None or not slot.bucket.numel
        for slot in plan.slots
    )


class PieceReduction:
    """Combines the gradients of one plan into pieces.

    Args:
        plan: where gradients lie; see `goes_in_pieces`.
        parameters: which rank owns what.
        memory: the memory of the host, whose ranks are all that train together.
        op: elementwise combination.
        finish: what is done to each combined gradient.
    """

    def __init__(
        self,
        plan: BucketPlan,
        parameters: DividedParameters,
        memory: HostMemory,
        op: ReduceOp,
        finish: Callable[[Tensor], None],
    ) -> None:
        self._parameters, self._memory, self._op, self._finish = parameters, memory, op, finish
        self._place_of = {
            index: _Place(slot, offset)
            for slot in plan.slots
            for index, offset in zip(slot.bucket.indices, slot.bucket.offsets, strict=True)
        }
        self._parts = [
            [part for piece in pieces for part in self._parts_of(piece.members)]
            for pieces in parameters.ranges
        ]
        self._sources: dict[Piece, list[_Source]] = {}

    def _parts_of(self, members: Sequence[Member]) -> list[_Part]:
        """Return the parts of a piece of a large gradient, none of another one."""
        member = members[0]
        place = self._place_of.get(member.param)
        if place is None or not isinstance(place.slot.storage, InPlaceGradient):
            return []
        assert len(members) == 1, "what lies beside a large gradient in its piece would get none"
        itemsize = self._parameters.itemsize(member.param)
        step = slot_bytes(self._memory.size) // itemsize
        parts = []
        for at in range(0, member.numel, step):
            first, numel = member.first + at, min(step, member.numel - at)
            is_last = at + step >= member.numel
            parts.append(_Part(member.param, first, numel, at, is_last, first * itemsize, numel * itemsize))
        return parts

    # -- inside the queue ---------------------------------------------------------------------------

    def run(self, exists: Sequence[bool], receiver: Receiver) -> None:
        """Combine all gradients that exist, and hand over those of this rank's pieces.

        Nobody waits at the end: the ranks must synchronize before one writes into a bucket again.

        Args:
            exists: whether some rank has a gradient, for each parameter; alike for those in one piece.
            receiver: gets them, piece by piece.

        Cost: one barrier per slot of staging memory of large gradients; every rank writes what is for the
            others and combines what is its own.
        """
        here = [p for p in self._parameters.pieces if exists[p.members[0].param] and self._is_dense(p)]
        self._memory.run_steps(self._combine_large(exists, [p for p in here if self._is_large(p)], receiver))
        for piece in here:
            if not self._is_large(piece):
                self._combine_small(piece, receiver)
        receiver.finish()

    def _combine_large(self, exists: Sequence[bool], pieces: Sequence[Piece], receiver: Receiver) -> Steps:
        """Combine the parts of large gradients; `pieces`: of this rank, in their order."""
        flats = {
            param: place.slot.storage.flat
            for param, place in self._place_of.items()
            if exists[param] and isinstance(place.slot.storage, InPlaceGradient)
        }
        addresses = {param: flat.data_ptr() for param, flat in flats.items()}
        parts = [[part for part in of_one if part.param in flats] for of_one in self._parts]
        ranges = [[(addresses[p.param] + p.start, p.nbytes) for p in of_one] for of_one in parts]
        mine = parts[self._memory.rank]
        own = [flats[part.param][part.first : part.first + part.numel] for part in mine]
        waiting = iter(pieces)
        open_: list[
            tuple[Piece, Tensor]
        ] = []  # the one whose parts come now, and the buffer for its gradient

        def combine(k: int, everyones: Sequence[Tensor]) -> None:
            part = mine[k]
            if not part.at:
                piece = next(waiting)
                first = piece.members[0].first
                lies_here = flats[part.param][first : first + piece.members[0].numel]
                open_[:] = [(piece, receiver.buffer_for(piece, lies_here))]
            piece, buffer = open_[0]
            self._combine(everyones, buffer[part.at : part.at + part.numel])
            if part.is_last:
                receiver.received(piece, buffer)

        return self._memory.reduce_to_owners(ranges, own, combine, in_place=receiver.in_place)

    def _is_dense(self, piece: Piece) -> bool:
        return piece.members[0].param in self._place_of

    def _is_large(self, piece: Piece) -> bool:
        return isinstance(self._place_of[piece.members[0].param].slot.storage, InPlaceGradient)

    def _combine_small(self, piece: Piece, receiver: Receiver) -> None:
        buffer = receiver.buffer_for(piece, None)
        for source in self._sources_of(piece):
            stop = source.first + source.numel
            everyones = [other[source.first : stop] for other in source.region.everyones]
            self._combine(everyones, buffer[source.at : source.at + source.numel])
        receiver.received(piece, buffer)

    def _combine(self, everyones: Sequence[Tensor], out: Tensor) -> None:
        combine_in_rank_order(everyones, self._op, out=out)
        self._finish(out)

    def _sources_of(self, piece: Piece) -> list[_Source]:
        if piece not in self._sources:
            self._sources[piece] = self._find_sources(piece)
        return self._sources[piece]

    def _find_sources(self, piece: Piece) -> list[_Source]:
        """Return where the members of a piece are; neighbours in both kinds of memory are taken together."""
        sources: list[_Source] = []
        for member in piece.members:
            place = self._place_of[member.param]
            region = place.slot.region
            if region is None:  # nothing in it
                continue
            first, last = place.offset + member.first, sources[-1] if sources else None
            if last is not None and last.region is region and first - last.first == member.at - last.at:
                sources[-1] = last._replace(numel=member.at + member.numel - last.at)
            else:
                sources.append(_Source(region, first, member.numel, member.at))
        return sources


class Settle:
    """Keeps the gradients for the step: large ones where this rank's lay, others in memory of their own."""

    in_place = True

    def __init__(self) -> None:
        self._buffers: dict[Piece, Tensor] = {}

    def buffer_for(self, piece: Piece, mine: Tensor | None) -> Tensor:
        """See `Receiver`."""
        if mine is not None:
            return mine
        numel = piece.tensor.numel()
        if piece not in self._buffers:
            self._buffers[piece] = torch.zeros(numel, dtype=piece.dtype)
        elif sum(member.numel for member in piece.members) < numel:
            self._buffers[piece].zero_()  # a factor of NaN makes NaN of the padding, too
        return self._buffers[piece]

    def received(self, piece: Piece, grad: Tensor) -> None:
        """See `Receiver`."""
        piece.grad = grad

    def finish(self) -> None:
        """See `Receiver`."""
