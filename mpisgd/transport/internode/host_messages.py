"""`HostMessages`: what all hosts send at the beginning of an operation, visible to all ranks of a host."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["HEADER_BYTES", "MESSAGE_BYTES", "OFFER_BYTES", "HostMessages"]

EXTREMES = struct.Struct("<QQ")
# A message begins with the extremes; what follows is aligned as any tensor is.
HEADER_BYTES = 64
OFFER_BYTES = 32 * 2**10
MESSAGE_BYTES = HEADER_BYTES + OFFER_BYTES
MAX_REMEMBERED = 256  # lengths of which the tensors are kept


class HostMessages:
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
        self._known: dict[tuple[int, torch.dtype], list[Tensor]] = {}

    def write(self, host: int, low: int, high: int) -> None:
        """Put the extremes of a host into its message."""
        EXTREMES.pack_into(self._parts[host], 0, low, high)

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest of all hosts."""
        first, *rest = self._parts
        lowest, highest = EXTREMES.unpack_from(first)
        for part in rest:
            low, high = EXTREMES.unpack_from(part)
            lowest, highest = min(lowest, low), max(highest, high)
        return lowest, highest

    def offers(self, numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return where each host's offer lies, [numel] each, until the next operation.

        The first rank of a host writes its own before the exchange begins; nobody else writes there. Many are
        remembered: making them anew takes longer than adding them up.
        """
        found = self._known.get((numel, dtype))
        if found is None:
            if len(self._known) >= MAX_REMEMBERED:
                self._known.clear()
            end = HEADER_BYTES + numel * dtype.itemsize
            with torch.inference_mode(False):  # the first to ask may be in that mode, later ones are not
                found = [message[HEADER_BYTES:end].view(dtype) for message in self.messages]
            self._known[numel, dtype] = found
        return found
