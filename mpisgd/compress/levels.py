"""`Levels`: numbers as multiples of a part of their segment's norm, rounded up or down at random.

A number x of a segment of norm s becomes one of the whole numbers -L to L, such that its expectation is
L x / s: floor(L x / s + u) with u uniform in [0, 1). It stands for s / L times that.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpisgd.compress.bit_packing import pack, packed_size, unpack
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.randomness import uniform

__all__ = ["Levels", "Segments", "segments_of"]

CHUNK_NUMEL = 2**16  # stays in cache from one pass to the next


class Segments(NamedTuple):
    """Segments of one length that follow each other in a bucket.

    Attributes:
        start: of the first one's elements in the bucket.
        first: its place among all segments.
        number: how many there are.
        length: elements of each.
    """

    start: int
    first: int
    number: int
    length: int

    def of(self, flat: Tensor) -> Tensor:
        """Return their elements of a bucket, [number, length]."""
        return flat[self.start : self.start + self.number * self.length].view(self.number, self.length)

    def chunks(self, *buckets: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield their elements of several buckets, of long segments a part at a time."""
        return zip(*(torch.split(self.of(flat), CHUNK_NUMEL, dim=1) for flat in buckets), strict=True)


def segments_of(numels: Sequence[int], length: int | None = None) -> list[Segments]:
    """Return segments of at most `length` elements, none of which spans two parameters.

    Those of equal length are together, as long as their elements stay in cache.
    """
    found: list[Segments] = []
    start = first = 0
    for numel in numels:
        for number, size in _divide(numel, numel if length is None else min(length, numel)):
            found.append(Segments(start, first, number, size))
            start, first = start + number * size, first + number
    return found


def _divide(numel: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield (number, length) of the segments of a parameter, in order."""
    if not numel:
        return
    whole, step = numel // length, max(1, CHUNK_NUMEL // length)
    for done in range(0, whole, step):
        yield min(step, whole - done), length
    if rest := numel % length:
        yield 1, rest


class Levels:
    """A codec of codes packed in bytes, and the norm of each segment behind them.

    Args:
        layout: of the bucket.
        num_levels: L.
        bits: of a code, which must hold 2 L + 1 of them.
        segments: all of the bucket.
        order: of the norm: inf for the largest magnitude, or 2.
    """

    def __init__(
        self, layout: BucketLayout, num_levels: int, bits: int, segments: Sequence[Segments], order: float
    ) -> None:
        self._layout = layout
        self._num_levels = num_levels
        self._bits = bits
        self._order = order
        self._segments = segments
        self._code_bytes = packed_size(layout.numel, bits)
        self.nbytes = self._code_bytes + sum(part.number for part in segments) * layout.dtype.itemsize

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return the codes and the norms."""
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=flat.device)
        codes = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
        for part in self._segments:
            norms = torch.linalg.vector_norm(part.of(flat), self._order, dim=1, keepdim=True)
            message[self._place(part)].copy_(norms.view(-1).view(torch.uint8))
            scales = self._num_levels / norms.masked_fill(norms == 0, 1)
            for values, out in part.chunks(flat, codes):
                levels = values * scales
                levels += uniform(values, random)
                levels.floor_().add_(self._num_levels)
                # The sum may have been rounded to the next whole number above the last level.
                out.copy_(levels.clamp_(0, 2 * self._num_levels))
        pack(codes, self._bits, out=message[: self._code_bytes])
        return message

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add what codes and norms stand for, or subtract it."""
        codes = unpack(message[: self._code_bytes], self._bits, self._layout.numel)
        for part in self._segments:
            # Copied, as codes of any number of bytes lie before them.
            norms = message[self._place(part)].clone().view(self._layout.dtype).view(-1, 1)
            for code, place in part.chunks(codes, out):
                levels = code.to(self._layout.dtype).sub_(self._num_levels)
                place.addcmul_(levels, norms / (sign * self._num_levels))

    def _place(self, part: Segments) -> slice:
        """Return where a message has the norms of these segments."""
        itemsize = self._layout.dtype.itemsize
        begin = self._code_bytes + part.first * itemsize
        return slice(begin, begin + part.number * itemsize)
