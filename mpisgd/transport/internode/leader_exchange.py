"""`LeaderExchange`: what the first ranks of all hosts send each other at the beginning of every operation.

Each sends every other one message: the smallest and the largest digest of its host's ranks, and, where the
operation is on a small tensor, what these ranks have added up to. So a small all-reduce between hosts takes
one message, its check included.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mpisgd.interfaces.communicator import Request
from mpisgd.transport.internode.leader import Leader
from mpisgd.transport.shm.staging import typed_pieces

__all__ = ["HEADER_BYTES", "MAX_HOSTS", "MESSAGE_BYTES", "PAYLOAD_BYTES", "HostMessages", "LeaderExchange"]

MAX_HOSTS = 64  # beyond this a logarithmic number of rounds is quicker than a message to everyone
TAG = 48
EXTREMES = struct.Struct("<QQ")
# A message begins with the extremes; what follows is aligned as any tensor is.
HEADER_BYTES = 64
PAYLOAD_BYTES = 32 * 2**10
MESSAGE_BYTES = HEADER_BYTES + PAYLOAD_BYTES
MAX_CACHED = 256  # lengths of which the tensors are kept


class HostMessages:
    """One message of each host, visible to all ranks of this one: the extremes of its digests, and a payload.

    Args:
        memory: MESSAGE_BYTES for each host; shared where the host has several ranks.
        num_hosts: how many.

    Attributes:
        memory: [MESSAGE_BYTES] of bytes for each host.
    """

    def __init__(self, memory: memoryview, num_hosts: int) -> None:
        self._parts = [memory[i * MESSAGE_BYTES : (i + 1) * MESSAGE_BYTES] for i in range(num_hosts)]
        self.memory = [torch.frombuffer(part, dtype=torch.uint8) for part in self._parts]
        starts, buffers = (HEADER_BYTES,) * num_hosts, self.memory
        # Making these anew takes longer than adding them up.
        self._payloads = lru_cache(MAX_CACHED)(
            lambda numel, dtype: typed_pieces(buffers, numel, dtype, starts)
        )

    def write(self, host: int, low: int, high: int) -> None:
        """Put the extremes of a host into its message."""
        EXTREMES.pack_into(self._parts[host], 0, low, high)

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest of all hosts."""
        lows, highs = zip(*map(EXTREMES.unpack_from, self._parts), strict=True)
        return min(lows), max(highs)

    def payloads(self, numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return where each host's payload lies, [numel] each, until the next operation.

        The first rank of a host writes its own before the exchange begins; nobody else writes there.
        """
        return self._payloads(numel, dtype)


class LeaderExchange:
    """The exchange among the hosts' first ranks. Cost: one message to every other host, all at once.

    Args:
        leader: this rank, the first of its host.
        messages: of all hosts.

    Attributes:
        write_payload: writes what this host sends along into its message and returns the bytes of it; called
            once, when the next exchange starts.
    """

    def __init__(self, leader: Leader, messages: HostMessages) -> None:
        self._leader = leader
        self._messages = messages
        self.write_payload: Callable[[], int] | None = None
        self._requests: list[Request] = []

    def start(self, low: int, high: int) -> None:
        """Begin with the extremes of this host."""
        host, memory = self._leader.host, self._messages.memory
        self._messages.write(host, low, high)
        nbytes = HEADER_BYTES
        if self.write_payload is not None:
            nbytes += self.write_payload()
            self.write_payload = None
        mine = memory[host][:nbytes]
        self._requests = self._leader.start(TAG, lambda _: mine, memory.__getitem__)

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        return self._leader.communicator.poll(self._requests)

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        return self._messages.extremes()

    def missing(self) -> str:
        """Describe the ranks that this rank waits for."""
        ranks = [self._leader.communicator.global_ranks[rank] for _, rank in self._leader.others]
        return f"one of the ranks {ranks} of other hosts, which has not come or waits for another one itself"
