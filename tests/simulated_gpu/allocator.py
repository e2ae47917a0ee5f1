"""Memory of the simulated GPU, and pinned memory of the host, by caching allocators as torch has them.

What is freed is handed out at once to the next allocation on the same stream, while kernels of other streams
may still use it, unless `record_stream` told of them. So a missing `record_stream` shows as wrong values.
Fresh memory, and every byte that is handed out for the first time, holds GARBAGE. Memory is never given back
to the system: a late kernel writes where it should not, but into memory of ours.

Python may collect garbage wherever an object is made, and the thread that has the lock then frees tensors in
the midst of what it does here. So what `free` changes is never read first and replaced later.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict, deque
from collections.abc import Callable

from simulated_gpu.stream import Event, Stream, Streams

__all__ = ["GARBAGE", "Allocator", "Block"]

GARBAGE = 0x5A
ROUND = 512


class Block:
    """Memory that belongs to one stream; `users` are others that were told of."""

    def __init__(self, size: int, stream: Stream | None) -> None:
        self.memory, self.size = _fresh(size), size
        self.address = ctypes.addressof(self.memory)
        self.stream = stream
        self.users: set[Stream] = set()


class Allocator:
    """Blocks of all devices, and pinned ones, whose stream is None.

    Attributes:
        allocated: bytes that are in use, by device; None: pinned.
        reserved: bytes that were taken from the system, which are kept, in the same way.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._free: dict[tuple[Stream | None, int], list[Block]] = {}
        self._waiting: deque[tuple[Block, list[Event]]] = deque()
        self._in_use: dict[int, Block] = {}
        self.allocated: dict[int | None, int] = defaultdict(int)
        self.reserved: dict[int | None, int] = defaultdict(int)

    def allocate(self, num_bytes: int, stream: Stream | None) -> Block:
        """Return memory for use on `stream`; None: pinned memory of the host."""
        size = -(-num_bytes // ROUND) * ROUND
        device = None if stream is None else stream.device
        with self._streams.lock:
            self._take_back()
            free = self._free.setdefault((stream, size), [])
            if not free:
                self.reserved[device] += size
            block = free.pop() if free else Block(size, stream)
            self._in_use[block.address] = block
            self.allocated[device] += size
            return block

    def free(self, block: Block) -> None:
        """Take a block back: at once, or when the streams that were told of are done with it."""
        device, size = None if block.stream is None else block.stream.device, block.size
        with self._streams.lock:
            del self._in_use[block.address]
            self.allocated[device] -= size
            users, block.users = block.users, set()
            events = [self._streams.record(user) for user in users]
            self._waiting.append((block, events))
            self._take_back()

    def _take_back(self) -> None:
        """Free what nobody uses any more, each block once."""
        for _ in range(len(self._waiting)):
            try:
                block, events = self._waiting.popleft()
            except IndexError:  # freed in the midst of this
                return
            if all(map(self._streams.query, events)):
                self._free.setdefault((block.stream, block.size), []).append(block)
            else:
                self._waiting.append((block, events))

    def find(self, address: int | None) -> Block | None:
        """Return the block in use that an address lies in."""
        if address is None:
            return None
        with self._streams.lock:
            if address in self._in_use:
                return self._in_use[address]
            for block in list(self._in_use.values()):
                if block.address <= address < block.address + block.size:
                    return block
            return None

    def record(self, address: int | None, stream: Stream) -> None:
        """Note that a stream uses the memory at an address: it is not handed out before that is over."""
        block = self.find(address)
        if block is not None and stream is not block.stream:
            block.users.add(stream)

    def calls(self) -> dict[str, Callable[..., object]]:
        """Return the functions for `guard.register`, without `allocate`."""
        return {
            "record_memory": lambda at, *stream: self.record(at, self._streams.get(*stream)),
            "free": lambda at: self.free(self._in_use[at]),
        }


def _fresh(size: int) -> ctypes.Array[ctypes.c_char]:
    memory = (ctypes.c_char * max(size, 1))()
    ctypes.memset(memory, GARBAGE, size)
    return memory
