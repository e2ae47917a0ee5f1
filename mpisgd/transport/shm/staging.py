"""What is copied where through the staging memory of a host: memory ranges, and spans of streams, as data.

Every rank has two staging buffers of its own, which all ranks of the host see; see `ShmTransport`.
"""

import ctypes
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.dtypes import HALF_DTYPES

__all__ = [
    "BUFFER_BYTES",
    "CHUNK_BYTES",
    "MemoryRange",
    "Span",
    "consecutive_spans",
    "copy_bytes",
    "cut",
    "equal_ranges",
    "prefetch",
    "range_of",
    "typed_pieces",
]

BUFFER_BYTES = 2**21  # of each of a rank's two staging buffers
# Where every rank has a core, 256 KiB to 1 MiB do equally well; where four ranks share two,
# 512 KiB does best: smaller chunks mean more barriers, larger ones leave the cache.
CHUNK_BYTES = 2**19

# The C library's copy takes two thirds of the time of `Tensor.copy_` on such chunks, serves every dtype and
# releases the interpreter's lock.
copy_bytes = ctypes.memmove

_unread = ctypes.create_string_buffer(CHUNK_BYTES)

# Address and length in bytes of memory that the caller keeps: a small message feels every tensor made.
MemoryRange = tuple[int, int]


def prefetch(*pieces: Tensor) -> None:
    """Bring pieces of a chunk into this core's cache, where torch needs that.

    From memory it adds bfloat16 at a third of the speed, and float16 at three quarters.
    """
    for piece in pieces:
        if piece.dtype in HALF_DTYPES:
            copy_bytes(_unread, piece.data_ptr(), min(piece.nbytes, CHUNK_BYTES))


@torch.inference_mode(False)  # the first to ask may be in that mode, later ones are not
def typed_pieces(
    buffers: Sequence[Tensor], numel: int, dtype: torch.dtype, starts: Sequence[int]
) -> list[Tensor]:
    """Return `numel` elements of each buffer of bytes, from its byte `starts[i]` on."""
    nbytes, pairs = numel * dtype.itemsize, zip(buffers, starts, strict=True)
    return [buffer[start : start + nbytes].view(dtype) for buffer, start in pairs]


def range_of(tensor: Tensor) -> MemoryRange:
    """Return the memory of a contiguous tensor."""
    return tensor.data_ptr(), tensor.nbytes


def equal_ranges(tensor: Tensor, count: int) -> list[MemoryRange]:
    """Return the memory of `count` equal pieces of a contiguous tensor."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes // count
    return [(address + i * nbytes, nbytes) for i in range(count)]


class Span(NamedTuple):
    """Consecutive bytes of a stream, and where they come from or go to.

    Attributes:
        rank: whose stream.
        start: the offset in the stream.
        address: in this process's memory.
        nbytes: how many.
    """

    rank: int
    start: int
    address: int
    nbytes: int


def consecutive_spans(ranges: Iterable[MemoryRange], rank: int) -> list[Span]:
    """Return the spans of memory ranges that follow each other in the stream of `rank`."""
    spans, start = [], 0
    for address, nbytes in ranges:
        spans.append(Span(rank, start, address, nbytes))
        start += nbytes
    return spans


def cut(spans: Sequence[Span], length: int, step: int) -> Iterable[Sequence[Span]]:
    """Return the parts of `spans` that lie in each chunk of `step` bytes, at least in one."""
    return (spans,) if length <= step else _cut(spans, length, step)


def _cut(spans: Sequence[Span], length: int, step: int) -> Iterator[Sequence[Span]]:
    ahead = sorted(spans, key=lambda span: span.start, reverse=True)
    here: list[Span] = []
    for start in range(0, length, step):
        stop = start + step
        while ahead and ahead[-1].start < stop:
            here.append(ahead.pop())
        yield [_within(span, start, stop) for span in here]
        here = [span for span in here if span.start + span.nbytes > stop]


def _within(span: Span, start: int, stop: int) -> Span:
    """Return the part of `span` in a chunk; its offset is counted from the beginning of the chunk."""
    first, last = max(span.start, start), min(span.start + span.nbytes, stop)
    return Span(span.rank, first - start, span.address + first - span.start, last - first)
