"""`LeaderExchange`: what the first ranks of all hosts send each other at the beginning of every operation.

Each sends every other one message: the smallest and the largest digest of its host's ranks, and, where the
operation is on a small tensor, what these ranks have added up to. So a small all-reduce between hosts takes
one message, its check included.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.interfaces.communicator import Request
from mpisgd.transport.internode.leader import Leader
from mpisgd.transport.shm.staging import typed_pieces

__all__ = [
    "HEADER_BYTES",
    "MESSAGE_BYTES",
    "PAYLOAD_BYTES",
    "HostMessages",
    "LeaderExchange",
    "Payload",
]

TAG = 48
EXTREMES = struct.Struct("<QQ")
# A message begins with the extremes; what follows is aligned as any tensor is.
HEADER_BYTES = 64
PAYLOAD_BYTES = 32 * 2**10
MESSAGE_BYTES = HEADER_BYTES + PAYLOAD_BYTES
MAX_CACHED = 256  # lengths of which the tensors are kept


class Payload(NamedTuple):
    """What hosts add up in their messages.

    Attributes:
        write: puts what this host's ranks have added up to into the first message; returns its bytes.
        add: adds up two messages, by their numbers, the earlier host's first, into the first message.
    """

    write: Callable[[], int]
    add: Callable[[int, int], None]


class HostMessages:
    """Some messages of hosts, visible to all ranks of this one: the extremes of digests, and a payload each.

    Args:
        memory: MESSAGE_BYTES for each message; shared where the host has several ranks.
        number: how many.

    Attributes:
        memory: [MESSAGE_BYTES] of bytes for each message.
    """

    def __init__(self, memory: memoryview, number: int) -> None:
        self._parts = [memory[i * MESSAGE_BYTES : (i + 1) * MESSAGE_BYTES] for i in range(number)]
        self.memory = [torch.frombuffer(part, dtype=torch.uint8) for part in self._parts]
        starts, buffers = (HEADER_BYTES,) * number, self.memory
        # Making these anew takes longer than adding them up.
        self._payloads = lru_cache(MAX_CACHED)(
            lambda numel, dtype: typed_pieces(buffers, numel, dtype, starts)
        )

    def write(self, number: int, low: int, high: int) -> None:
        """Put extremes into a message."""
        EXTREMES.pack_into(self._parts[number], 0, low, high)

    def extremes_of(self, number: int) -> tuple[int, int]:
        """Return the extremes of a message."""
        low, high = EXTREMES.unpack_from(self._parts[number])
        return low, high

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest of all messages."""
        lows, highs = zip(*map(EXTREMES.unpack_from, self._parts), strict=True)
        return min(lows), max(highs)

    def payloads(self, numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Return where the payload of each message lies, [numel] each, until the next operation.

        The first rank of a host writes its own before the exchange begins; nobody else writes there.
        """
        return self._payloads(numel, dtype)


class LeaderExchange:
    """The exchange among the hosts' first ranks. Cost: one message to every other host, all at once.

    Args:
        leader: this rank, the first of its host.
        messages: of all hosts.

    Attributes:
        payload: what this host sends along; taken when the next exchange starts.
    """

    def __init__(self, leader: Leader, messages: HostMessages) -> None:
        self._leader = leader
        self._messages = messages
        self.payload: Payload | None = None
        self._requests: list[Request] = []

    def start(self, low: int, high: int) -> None:
        """Begin with the extremes of this host."""
        host, memory = self._leader.host, self._messages.memory
        self._messages.write(host, low, high)
        nbytes = HEADER_BYTES
        if self.payload is not None:
            nbytes += self.payload.write()
            self.payload = None
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
