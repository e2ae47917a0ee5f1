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

    def norms_of(self, norms: Tensor) -> Tensor:
        """Return theirs of the norms of all segments, [number, 1]."""
        return norms[self.first : self.first + self.number].view(-1, 1)


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
        self._num_segments = sum(part.number for part in segments)
        self._code_bytes = packed_size(layout.numel, bits)
        self.nbytes = self._code_bytes + self._num_segments * layout.dtype.itemsize

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return the codes and the norms."""
        norms = flat.new_empty(self._num_segments)
        codes = torch.empty(flat.numel(), dtype=torch.uint8, device=flat.device)
        for part in self._segments:
            values, mine = part.of(flat), part.norms_of(norms)
            torch.linalg.vector_norm(values, self._order, dim=1, keepdim=True, out=mine)
            levels = values * (self._num_levels / mine.masked_fill(mine == 0, 1))
            levels += uniform(values, random)
            levels.floor_().add_(self._num_levels)
            # The sum may have been rounded to the next whole number above the last level.
            part.of(codes).copy_(levels.clamp_(0, 2 * self._num_levels))
        return torch.cat([pack(codes, self._bits), norms.view(torch.uint8)])

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add what codes and norms stand for, or subtract it."""
        codes = unpack(message[: self._code_bytes], self._bits, self._layout.numel)
        norms = message[self._code_bytes :].clone().view(self._layout.dtype)
        for part in self._segments:
            levels = part.of(codes).to(self._layout.dtype).sub_(self._num_levels)
            part.of(out).addcmul_(levels, part.norms_of(norms) / (sign * self._num_levels))
