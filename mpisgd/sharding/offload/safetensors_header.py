"""The header of a safetensors file whose tensors have places already.

    8 bytes   length of the header, little endian
    header    {NAME: {"dtype": "F32", "shape": [3, 4], "data_offsets": [BEGIN, END]}, ...} and spaces
    data      the tensors

The format has no holes: what lies between two tensors is a tensor of bytes of its own, `padding.0` and so on.
"""

import json
import math
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from mpisgd.dtypes import SAFETENSORS_DTYPES

__all__ = ["Stored", "header", "header_room"]

NAME_BYTES, BYTES_PER_TENSOR = 120, 160  # in the header


class Stored(NamedTuple):
    """A tensor in a file; `start` is its first byte there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + math.prod(self.shape) * self.dtype.itemsize


def header_room(num_tensors: int) -> int:
    """Return a number of bytes in which the header of so many tensors, and of padding, has room."""
    return 64 + num_tensors * (NAME_BYTES + 2 * BYTES_PER_TENSOR)


def header(tensors: Iterable[Stored], room: int, end: int) -> bytes:
    """Return the first `room` bytes of a file.

    Args:
        tensors: what is in it, all after `room`.
        room: where the data begin.
        end: the size of the file.

    Raises:
        ValueError: it does not have room.
    """
    entries: dict[str, Any] = {}
    for tensor in _without_holes(tensors, room, end):
        entries[tensor.name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start - room, tensor.end - room],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    if len(text) > room - 8:
        raise ValueError(f"{len(text)} bytes of header, and room for {room - 8}")
    return struct.pack("<Q", room - 8) + text.ljust(room - 8)


def _without_holes(tensors: Iterable[Stored], begin: int, end: int) -> Iterator[Stored]:
    at, holes = begin, 0
    last = Stored("", torch.uint8, (0,), end)
    for tensor in [*sorted(tensors, key=lambda tensor: tensor.start), last]:
        if at < tensor.start:
            yield Stored(f"padding.{holes}", torch.uint8, (tensor.start - at,), at)
            holes += 1
        if tensor is not last:
            yield tensor
        at = tensor.end
