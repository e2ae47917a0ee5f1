"""Ranges of this process's memory, and streams of bytes that are made of them: plain data.

A small message feels every tensor that is made, so what only moves is described by addresses. They hold no
reference: whoever describes memory keeps it.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

__all__ = ["MemoryRange", "Span", "consecutive_spans", "equal_ranges", "range_of"]

MemoryRange = tuple[int, int]  # address and length in bytes


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
