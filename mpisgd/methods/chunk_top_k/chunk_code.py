"""`ChunkCode`: the largest elements of each chunk of a bucket, in one message.

    | low 8 bits of the places in their chunks | their other bits | codes | bounds of all chunks |

A place has log2 of the chunk's length in bits. The bounds are the smallest and the largest magnitude of what
is sent of a chunk; a code is a sign bit before one of the levels between them, which are evenly spaced. Only
comparisons decide what is sent, and what it stands for is no sum: the order of additions plays no role.
"""

from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpisgd.compress.bit_packing import pack, packed_size, unpack
from mpisgd.compress.compressor import BucketLayout
from mpisgd.compress.levels import Segments, segments_of
from mpisgd.compress.selection import top_k_of_rows

__all__ = ["ChunkCode", "place_bits"]

BYTE = 8  # bits


def place_bits(chunk: int) -> list[int]:
    """Return the bits of a place in a chunk: of its low byte, and of the other one if there is one."""
    bits = max(1, (chunk - 1).bit_length())
    return [bits] if bits <= BYTE else [BYTE, bits - BYTE]


class _Chunks(NamedTuple):
    """Chunks of one length that follow each other.

    Attributes:
        elements: where they lie in the bucket.
        first: of their elements that are sent, among all.
        kept: how many each sends.
    """

    elements: Segments
    first: int
    kept: int

    def sent(self, values: Tensor) -> Tensor:
        """Return the entries of `values` for the elements that these chunks send, [number, kept]."""
        number = self.elements.number
        return values[self.first : self.first + number * self.kept].view(number, self.kept)

    def bounds(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return their smallest magnitudes and their largest ones, [number, 1] each."""
        first, number = self.elements.first, self.elements.number
        least, largest = torch.split(values[first : first + number], 1, dim=1)
        return least, largest


class ChunkCode:
    """A codec of the largest elements of each chunk.

    Args:
        layout: of the bucket; chunks begin anew with each parameter, whose last one may be shorter.
        keep: elements that a whole chunk sends; a shorter one sends as large a part, and one at least.
        chunk: elements of a chunk.
        bits: of an element that is sent, its sign included.

    Attributes:
        nbytes: of a message.
    """

    def __init__(self, layout: BucketLayout, *, keep: int, chunk: int, bits: int) -> None:
        self._dtype, self._bits, self._top = layout.dtype, bits, (1 << (bits - 1)) - 1
        segments = segments_of([shape.numel() for shape in layout.shapes], chunk)
        counts = [max(1, round(keep * each.length / chunk)) for each in segments]
        sent = [each.number * count for each, count in zip(segments, counts, strict=True)]
        firsts = accumulate(sent, initial=0)
        self._chunks = [_Chunks(*each) for each in zip(segments, firsts, counts, strict=False)]
        self._numel, self._number = sum(sent), sum(each.number for each in segments)
        self._packed_bits = [*place_bits(chunk), bits]
        packed = [packed_size(self._numel, each) for each in self._packed_bits]
        self._lengths = [*packed, self._number * 2 * layout.dtype.itemsize]
        self.nbytes = sum(self._lengths)

    def compress(self, flat: Tensor, random: np.random.Generator) -> Tensor:
        """Return the places, the codes and the bounds."""
        message = torch.empty(self.nbytes, dtype=torch.uint8, device=flat.device)
        *packed, limits = torch.split(message, self._lengths)
        *places, codes = (message.new_empty(self._numel) for _ in self._packed_bits)
        bounds = flat.new_empty(self._number, 2)
        for part in self._chunks:
            rows = part.elements.of(flat)
            chosen = top_k_of_rows(rows, part.kept)
            values = rows.gather(1, chosen)
            levels = self._levels(values.abs(), *part.bounds(bounds))
            part.sent(codes).copy_(levels).bitwise_or_((values < 0).to(torch.uint8) << (self._bits - 1))
            for number, some in enumerate(places):
                part.sent(some).copy_(chosen >> BYTE * number & 0xFF)
        for numbers, bits, out in zip((*places, codes), self._packed_bits, packed, strict=True):
            pack(numbers, bits, out=out)
        limits.copy_(bounds.view(-1).view(torch.uint8))
        return message

    def _levels(self, magnitudes: Tensor, least: Tensor, largest: Tensor) -> Tensor:
        """Set the bounds of magnitudes [number, kept]; return their levels, from 0 to the top one."""
        torch.amin(magnitudes, 1, keepdim=True, out=least)
        torch.amax(magnitudes, 1, keepdim=True, out=largest)
        steps = (largest - least) / self._top
        levels = (magnitudes - least) / steps.masked_fill(steps == 0, 1)
        return levels.round_().nan_to_num_(nan=0.0).clamp_(0, self._top)  # of what is infinite nothing counts

    def decompress(self, message: Tensor, out: Tensor, sign: int = 1) -> None:
        """Add the elements, or subtract them."""
        *packed, limits = torch.split(message, self._lengths)
        numbers = zip(packed, self._packed_bits, strict=True)
        *places, codes = (unpack(some, bits, self._numel) for some, bits in numbers)
        # Copied, as any number of bytes lies before them.
        bounds = limits.clone().view(self._dtype).view(self._number, 2)
        for part in self._chunks:
            values = self._values(part.sent(codes), *part.bounds(bounds))
            chosen = torch.zeros(values.shape, dtype=torch.int64, device=out.device)
            for number, some in enumerate(places):
                chosen |= part.sent(some).to(torch.int64) << BYTE * number
            part.elements.of(out).scatter_add_(1, chosen, values if sign > 0 else values.neg_())

    def _values(self, codes: Tensor, least: Tensor, largest: Tensor) -> Tensor:
        """Return the values of codes in chunks with these smallest and largest magnitudes."""
        levels = (codes & self._top).to(self._dtype)
        values = levels.mul_((largest - least) / self._top).add_(least)
        return torch.where(codes > self._top, -values, values)
