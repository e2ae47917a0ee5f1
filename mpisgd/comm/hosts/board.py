"""`Board`: the messages of all hosts at the beginning of an operation, for all ranks of a host to see."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HEADER_BYTES", "MESSAGE_BYTES", "OFFER_BYTES", "Board"]

EXTREMES = struct.Struct("<QQ")
# A message begins with the extremes; what follows is aligned as any tensor is.
HEADER_BYTES = 64
OFFER_BYTES = 32 * 2**10
MESSAGE_BYTES = HEADER_BYTES + OFFER_BYTES


class Board:
    """One message for each host: the extremes of its digests, and what it offers.

    Args:
        memory: MESSAGE_BYTES for each host; shared where the host has several ranks.
        num_hosts: how many.

    Attributes:
        messages: [MESSAGE_BYTES] of bytes for each host.
    """

    def __init__(self, memory: memoryview, num_hosts: int) -> None:
        self._parts = [memory[i * MESSAGE_BYTES : (i + 1) * MESSAGE_BYTES] for i in range(num_hosts)]
        self.messages = [torch.frombuffer(part, dtype=torch.uint8) for part in self._parts]

    def write(self, host: int, low: int, high: int) -> None:
        """Put the extremes of a host into its message."""
        EXTREMES.pack_into(self._parts[host], 0, low, high)

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest of all hosts."""
        seen = [EXTREMES.unpack_from(part) for part in self._parts]
        return min(low for low, _ in seen), max(high for _, high in seen)

    def offered(self, numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return what every host has offered, [numel] each; to be read only, until the next operation."""
        end = HEADER_BYTES + numel * dtype.itemsize
        return [message[HEADER_BYTES:end].view(dtype) for message in self.messages]
