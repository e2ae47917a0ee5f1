"""`all_reduce_cma`: without staging memory, where the ranks of a host can reach each other's.

A rank reads a chunk of what belongs to it from all others, combines it with its own, and writes the result to
all others, before the next chunk. Nobody waits for anybody between the beginning and the end:

    rank 0   meet | read(0) add(0) write(0) | read(1) add(1) write(1) | ... | meet
    rank 1   meet | read(0) add(0) write(0) | read(1) add(1) write(1) | ... | meet
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpisgd.core.dtypes import ReduceOp, combine_in_rank_order
from mpisgd.transport.cma.cross_memory_attach import CrossMemoryAttach
from mpisgd.transport.cma.peer_access import PeerAccess
from mpisgd.transport.messages.link import split_evenly
from mpisgd.transport.shm.reduction import all_reduce_in_parts
from mpisgd.transport.shm.streams import bring_near, copy_bytes

if TYPE_CHECKING:
    from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["CmaTransport", "all_reduce_cma"]

CHUNK_BYTES = 2**18
SCRATCH_BYTES = 2**20  # of all pieces of a chunk together, which should stay in a core's cache
ALIGN_BYTES = 64


class CmaTransport:
    """What a rank needs to reduce in the memory of the others.

    Args:
        memory: of the ranks of the host.
        exposure: of this rank's.
        rank: this one.
        size: how many there are.

    Attributes:
        chunk_bytes: how much of a tensor is combined at a time.
        exposure: see above.
        large_pages: whether large tensors lie in large pages, on all ranks.
    """

    def __init__(self, memory: CrossMemoryAttach, exposure: PeerAccess, rank: int, size: int) -> None:
        self.exposure = exposure
        self.large_pages = memory.large_pages
        self.chunk_bytes = min(CHUNK_BYTES, SCRATCH_BYTES // size // ALIGN_BYTES * ALIGN_BYTES)
        self._memory = memory
        self._rank = rank
        self._others = [*range(rank + 1, size), *range(rank)]  # not all begin with the same
        with torch.inference_mode(False):
            scratch = torch.empty(size * self.chunk_bytes, dtype=torch.uint8)
        self._slots = scratch.view(size, self.chunk_bytes).unbind()
        self._known: tuple[int, torch.dtype] | None = None
        self._known_pieces: list[Tensor] = []
        self._addresses = [slot.data_ptr() for slot in self._slots]

    def place_of(self, flat: Tensor) -> int:
        """Return the address of a tensor, 0 where the others cannot reach it."""
        address = flat.data_ptr()
        return address if not self.exposure.has_left and self._memory.is_mine(address, flat.nbytes) else 0

    def combine(self, mine: Tensor, places: Sequence[int], op: ReduceOp) -> None:
        """Combine a chunk with those of the others into this rank's.

        Args:
            mine: [n], of at most `chunk_bytes`.
            places: where everyone's lies.
            op: elementwise combination.
        """
        nbytes = mine.nbytes
        for rank in self._others:
            self._memory.read(rank, self._addresses[rank], places[rank], nbytes)
        pieces = self._pieces(nbytes, mine.dtype).copy()
        result, pieces[self._rank] = pieces[self._rank], mine
        bring_near(mine)
        if self._rank < 2:  # the first two are read before anything is written
            combine_in_rank_order(pieces, op, out=mine)
        else:
            combine_in_rank_order(pieces, op, out=result)
            copy_bytes(places[self._rank], self._addresses[self._rank], nbytes)

    def _pieces(self, nbytes: int, dtype: torch.dtype) -> list[Tensor]:
        """Return the scratch memory for everyone's; nearly all chunks have the same length."""
        if self._known != (nbytes, dtype):
            with torch.inference_mode(False):
                self._known_pieces = [slot[:nbytes].view(dtype) for slot in self._slots]
            self._known = (nbytes, dtype)
        return self._known_pieces

    def give(self, nbytes: int, places: Sequence[int]) -> None:
        """Copy a chunk of this rank's to the others.

        Args:
            nbytes: its length.
            places: as for `combine`.
        """
        for rank in self._others:
            self._memory.write(rank, places[rank], places[self._rank], nbytes)


def all_reduce_cma(plane: "ShmTransport", flat: Tensor, op: ReduceOp) -> Iterator[None]:
    """Combine contiguous `flat` [n], of the CPU and any reducible dtype, over the ranks, in place.

    Every rank combines its own part for all, in everyone's memory; where some rank's tensor cannot be
    reached, they go through the staging memory. It yields wherever all ranks of the host must have come; the
    first time is the handshake.

    Cost: two meetings; three passes over the message, two of them in cache.
    """
    direct = plane.direct
    assert direct is not None
    place = direct.place_of(flat)
    direct.exposure.begin(flat if place else None)  # who drives this ends it, should something be raised
    plane.control.offer(place)
    yield
    places = plane.control.offers()
    if not all(places):
        direct.exposure.end()
        yield from all_reduce_in_parts(plane, flat, op)
        return
    _combine_part(plane, direct, flat, op, places)
    yield
    direct.exposure.end()


def _combine_part(
    plane: "ShmTransport", direct: CmaTransport, flat: Tensor, op: ReduceOp, places: Sequence[int]
) -> None:
    first, last = split_evenly(flat.numel(), plane.size)[plane.rank]
    for start, mine in _chunks(flat[first:last], direct.chunk_bytes):
        offset = (first + start) * flat.element_size()
        here = [place + offset for place in places]
        if not direct.exposure.begin_writing():
            return  # one has left, for whom all others wait at the end
        direct.combine(mine, here, op)
        direct.give(mine.nbytes, here)
        direct.exposure.end_writing()


def _chunks(flat: Tensor, nbytes: int) -> Iterator[tuple[int, Tensor]]:
    """Yield pieces of at most `nbytes`, and the element where each begins."""
    step = nbytes // flat.element_size()
    return zip(itertools.count(0, step), torch.split(flat, step), strict=False)
