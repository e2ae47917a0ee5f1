"""`Announcement`: what travels in the place of a message whose tensor stays where it is for now.

A tensor on a GPU may go to another GPU directly, or through host memory: that depends on where its receiver
wants it. So its sender sends this instead, by the tag of the message, and MPI matches it as it would match
the message: tags, sources and order are MPI's. Whoever receives it says how the tensor is to come.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ANNOUNCEMENT_BYTES", "Announcement", "announced_in"]

# A message of this length that begins so is taken for one.
MARK = bytes.fromhex("8f1c5a9be07d4e36b2c461f3d8a90e57")
LAYOUT = struct.Struct("=16sQQiI16s8x")
ANNOUNCEMENT_BYTES = LAYOUT.size


class Announcement(NamedTuple):
    """A message to come.

    Attributes:
        number: of it among those that its sender has announced.
        nbytes: of the tensor.
        device: the index of the device that it lies on.
        gpu: a checksum of what tells this device from the others of its host.
        dtype: of the tensor, as text.
    """

    number: int
    nbytes: int
    device: int
    gpu: int
    dtype: str

    def packed(self) -> Tensor:
        """Return it as [ANNOUNCEMENT_BYTES] bytes."""
        packed = LAYOUT.pack(MARK, *self[:-1], self.dtype.encode()[:16])
        return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def announced_in(memory: Tensor, nbytes: int) -> Announcement | None:
    """Return the announcement that has come into contiguous memory, None where it is something else.

    Args:
        memory: of a receive.
        nbytes: that have come.
    """
    if nbytes != ANNOUNCEMENT_BYTES or memory.nbytes < nbytes:
        return None
    packed = memory.view(-1).view(torch.uint8)[:nbytes].numpy().tobytes()
    mark, number, length, device, gpu, dtype = LAYOUT.unpack(packed)
    return Announcement(number, length, device, gpu, dtype.rstrip(b"\0").decode()) if mark == MARK else None
