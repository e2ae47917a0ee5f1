"""Streams: bytes on their way between the ranks of a host, whatever the collective.

Every rank writes one stream of bytes, of any length, through its staging memory; every rank takes from the
streams what it wants. What goes where is data (`Span`s), so one loop moves everything. The streams go in
chunks that stay in cache, and two halves of the staging memory are used in turn: while others still take
chunk k from one half, chunk k + 1 is written into the other, so one meeting per chunk is enough.

    rank 0   write(0) | take(0) write(1) | take(1) write(2) | ...
    rank 1   write(0) | take(0) write(1) | take(1) write(2) | ...
    half        0          0       1          1       0

The meetings are where the generators here yield: the first can be the handshake of the operation, so that a
message of one chunk needs nothing else; the others are barriers.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from mpisgd.core.dtypes import HALF_TYPES

__all__ = [
    "CHUNK_BYTES",
    "Place",
    "Span",
    "Staging",
    "bring_near",
    "copy_bytes",
    "cut",
    "in_a_row",
    "move",
    "pieces_of",
    "place_of",
]

# Where every rank has a core, 256 KiB to 1 MiB (a half of the staging memory) do equally well; where four
# ranks share two, 512 KiB does best: smaller chunks mean more meetings, larger ones leave the cache.
CHUNK_BYTES = 2**19

# The C library's copy takes two thirds of the time of `Tensor.copy_` on such chunks, serves every dtype and
# releases the interpreter's lock.
copy_bytes = ctypes.memmove


_unread = ctypes.create_string_buffer(CHUNK_BYTES)


def bring_near(*pieces: Tensor) -> None:
    """Bring pieces of a chunk into this core's cache, where torch needs that.

    From memory it adds bfloat16 at a third of the speed, and float16 at three quarters.
    """
    for piece in pieces:
        if piece.dtype in HALF_TYPES:
            copy_bytes(_unread, piece.data_ptr(), min(piece.nbytes, CHUNK_BYTES))


# Address and length in bytes of memory that the caller keeps: a small message feels every tensor made.
Place = tuple[int, int]


def place_of(tensor: Tensor) -> Place:
    """Return where a contiguous tensor lies."""
    return tensor.data_ptr(), tensor.nbytes


def pieces_of(tensor: Tensor, count: int) -> list[Place]:
    """Return where `count` equal pieces of a contiguous tensor lie."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes // count
    return [(address + i * nbytes, nbytes) for i in range(count)]


class Span(NamedTuple):
    """Consecutive bytes of a stream, and where they come from or go to.

    Attributes:
        rank: whose stream.
        start: the place in the stream.
        address: the place in this process's memory.
        nbytes: how many.
    """

    rank: int
    start: int
    address: int
    nbytes: int


class Staging(Protocol):
    """What streams need of a node plane."""

    @property
    def rank(self) -> int:
        """This rank."""

    def coming_half(self) -> list[int]:
        """Return where everyone's staging memory for the next chunk begins."""

    def advance(self) -> None:
        """Go on to it."""


def in_a_row(places: Iterable[Place], rank: int) -> list[Span]:
    """Return the spans of places that follow each other in the stream of `rank`."""
    spans, start = [], 0
    for address, nbytes in places:
        spans.append(Span(rank, start, address, nbytes))
        start += nbytes
    return spans


def cut(spans: Sequence[Span], length: int, step: int) -> Iterator[Sequence[Span]]:
    """Yield the parts of `spans` that lie in each chunk of `step` bytes, at least in one; see `move`."""
    if length <= step:
        yield spans
        return
    ahead = sorted(spans, key=lambda span: span.start, reverse=True)
    here: list[Span] = []
    for start in range(0, length, step):
        stop = start + step
        while ahead and ahead[-1].start < stop:
            here.append(ahead.pop())
        yield [_within(span, start, stop) for span in here]
        here = [span for span in here if span.start + span.nbytes > stop]


def _within(span: Span, start: int, stop: int) -> Span:
    """Return the part of `span` in a chunk; its place is counted from the beginning of the chunk."""
    first, last = max(span.start, start), min(span.start + span.nbytes, stop)
    return Span(span.rank, first - start, span.address + first - span.start, last - first)


def move(staging: Staging, gives: Sequence[Span], takes: Sequence[Span], length: int) -> Iterator[None]:
    """Write this rank's stream and take from all of them; yields wherever all ranks must have come.

    The caller keeps the memory that the spans describe. What is taken must not go where bytes are that are
    still to be given, unless they are those very bytes.

    Args:
        staging: the plane.
        gives: this rank's stream.
        takes: what it wants of the streams.
        length: of the longest stream, in bytes; the same on all ranks.

    Cost: two passes over the bytes, one of them in cache; a meeting per chunk.
    """
    for written, taken in zip(cut(gives, length, CHUNK_BYTES), cut(takes, length, CHUNK_BYTES), strict=True):
        half = staging.coming_half()
        mine = half[staging.rank]
        for _, start, address, nbytes in written:
            copy_bytes(mine + start, address, nbytes)
        yield
        staging.advance()
        for rank, start, address, nbytes in taken:
            copy_bytes(address, half[rank] + start, nbytes)
