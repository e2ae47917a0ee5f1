"""`BlockCache`: a file of blocks, of which the ones in use, the next ones and the last ones are in memory.

    file      | 0 | 1 | 2 | 3 | 4 | 5 | ...
    buffers         w   u   r   r             w: being written, u: in use, r: read ahead

Threads read and write while the program computes; system calls leave Python's lock to it meanwhile. The
number of buffers is fixed, and each is used again and again: memory that is new to a process costs as much
as a copy.
"""

import functools
import hashlib
import mmap
import zlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from enum import Enum, auto
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.errors import OffloadError
from mpisgd.sharding.offload.block_store import BlockStore
from mpisgd.sharding.offload.description import CRC32
from mpisgd.sharding.offload.private_file import memory_of, rounded_up

__all__ = ["AccessOrder", "BlockCache", "Checksum", "aligned_memory", "checksum_of"]


class AccessOrder:
    """Tells which blocks are probably used next, from the order in which they were used before.

    Training uses blocks in the same order in every step: the state of pieces one after the other, layers
    forward and then backward. After `a, b` that is expected which has followed `a, b` the last time. Two are
    looked at because of the turn from forward to backward; where they never came together, the last alone:

        forward 0 1 2 | backward 2 1 0         after 1, 2 comes 2;   after 2, 2 comes 1;   after 2, 1 comes 0
    """

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}
        self._next_of_one: dict[int, int] = {}
        self._last = (-1, -1)

    def note(self, index: int) -> None:
        """Note that a block is used."""
        self._next[self._last] = self._next_of_one[self._last[1]] = index
        self._last = (self._last[1], index)

    def expected(self, count: int) -> list[int]:
        """Return the next blocks, at most `count`, each once, without the one that is used now."""
        found: list[int] = []
        last = self._last
        for _ in range(2 * count):  # at a turn some come twice
            following = self._next.get(last, self._next_of_one.get(last[1]))
            if following is None or len(found) == count:
                break
            last = (last[1], following)
            if following != self._last[1] and following not in found:
                found.append(following)
        return found

    def forget(self) -> None:
        """Forget everything."""
        self._next.clear()
        self._next_of_one.clear()
        self._last = (-1, -1)


Checksum = Callable[[memoryview], str]


NUM_THREADS = 4  # enough requests at a time for a disk, where each is for megabytes


@functools.cache
def _io_threads() -> ThreadPoolExecutor:
    """Return the threads that read and write for all files: each takes memory for its stack."""
    return ThreadPoolExecutor(NUM_THREADS, "mpisgd offload")


class _Role(Enum):
    IDLE = auto()  # as in the file, and not needed now
    AHEAD = auto()  # read, or being read, and not used yet
    IN_USE = auto()
    WRITING = auto()


class _Buffer:
    """Memory for a block.

    Attributes:
        memory: at least as large as the block.
        role: what the buffer is for now.
        pending: what is read or written at the moment.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.role = _Role.IN_USE
        self.pending: Future[None] | None = None

    def wait(self) -> None:
        """Wait for what is read or written, and raise its error."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    @property
    def is_done(self) -> bool:
        return self.pending is None or self.pending.done()


class _Block(NamedTuple):
    """Where a block is in the file; `start` is -1 before it is written for the first time."""

    start: int
    nbytes: int


def aligned_memory(nbytes: int) -> Tensor:
    """Return new bytes, which begin at a page, as direct I/O asks for."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, rounded_up(max(1, nbytes)), private), dtype=torch.uint8)


def checksum_of(name: str | None) -> Checksum | None:
    """Return the checksum of a name as a function; None for none.

    Args:
        name: `"crc32"`, about 1 GB/s or more, finds what goes wrong by chance; or one of hashlib's.
    """
    if name is None:
        return None
    return _crc32 if name == CRC32 else lambda memory: hashlib.new(name, memory).hexdigest()


def _crc32(memory: memoryview) -> str:
    return f"{zlib.crc32(memory):08x}"


class BlockCache:
    """Blocks of a `BlockStore`, used by one thread.

    Args:
        store: its own; the blocks come after what is in it already.
        prefetch: how many blocks are read ahead, and how many may wait to be written.
        block_bytes: of most blocks; a larger one gets a larger buffer.
        checksum: of each block, None for none.

    Raises:
        OffloadError: from any method: a block could not be written or read, or is not what was written. The
            content is lost then, and whatever is called next raises it again.
    """

    def __init__(
        self, store: BlockStore, prefetch: int, block_bytes: int, checksum: Checksum | None = None
    ) -> None:
        self._store, self._prefetch, self._block_bytes = store, prefetch, block_bytes
        self._checksum = checksum
        self._base = store.size
        self._blocks: list[_Block] = []
        self._sums: dict[int, str] = {}
        self._order = AccessOrder()
        self._held: dict[int, _Buffer] = {}  # in the order of their last use
        self._spare: list[_Buffer] = []
        self._num_buffers = 0
        self._most = 2 * prefetch + 2  # two are in use where one ends and the next begins
        self._error: OffloadError | None = None
        self._threads = _io_threads()

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def nbytes_in_memory(self) -> int:
        """The bytes of all buffers."""
        return sum(buffer.memory.nbytes for buffer in [*self._held.values(), *self._spare])

    def start_of(self, index: int) -> int:
        """Return where a block begins in the file."""
        return self._blocks[index].start

    # -- blocks in use -------------------------------------------------------------------------------

    def append(self, nbytes: int) -> tuple[int, Tensor]:
        """Return a new block, which is in use, and its memory, [nbytes], with any content."""
        self._raise_earlier()
        buffer = self._room(nbytes, wait=True)
        assert buffer is not None
        index = len(self._blocks)
        self._blocks.append(_Block(-1, nbytes))
        self._hold(index, buffer, _Role.IN_USE)
        self._order.note(index)
        return index, buffer.memory[:nbytes]

    def get(self, index: int) -> Tensor:
        """Return the memory of a block, [nbytes], which is in use until `put`; have the next ones read."""
        self._raise_earlier()
        self._order.note(index)
        buffer = self._held.get(index) or self._start_read(index, wait=True)
        assert buffer is not None
        self._hold(index, buffer, _Role.IN_USE)
        self.read_ahead()
        self._wait(buffer)
        return buffer.memory[: self._blocks[index].nbytes]

    def put(self, index: int, *, changed: bool) -> None:
        """Note that a block is not in use any more; have it written if it has `changed`."""
        self._raise_earlier()
        buffer = self._held[index]
        assert buffer.role is _Role.IN_USE
        if changed:
            self._start_write(index, buffer)
            self._limit_writes()
        else:
            self._hold(index, buffer, _Role.IDLE)

    def seal(self, index: int, nbytes: int) -> None:
        """Give a new block its final size and its place in the file; it is still in use.

        Raises:
            OffloadError: the disk is full.
        """
        start = self._store.allocate(rounded_up(nbytes))
        self._blocks[index] = _Block(start, rounded_up(nbytes))

    def read_ahead(self) -> None:
        """Have the blocks read that are probably used next."""
        for index in self._order.expected(self._prefetch):
            buffer = self._held.get(index)
            if buffer is None:
                if self._blocks[index].start < 0 or self._start_read(index, wait=False) is None:
                    break
            elif buffer.role is _Role.IDLE:
                self._hold(index, buffer, _Role.AHEAD)

    def flush(self) -> None:
        """Wait until all that was put is in the file."""
        self._raise_earlier()
        for index, buffer in list(self._held.items()):
            if buffer.role is _Role.WRITING:
                self._wait(buffer)
                self._hold(index, buffer, _Role.IDLE)

    def clear(self) -> None:
        """Forget all blocks, in use or not, and an earlier error; give their room in the file back."""
        self._error = None
        for buffer in self._held.values():
            if buffer.pending is not None:
                buffer.pending.exception()  # of no interest any more
                buffer.pending = None
            self._spare.append(buffer)
        self._held.clear()
        self._blocks.clear()
        self._sums.clear()
        self._order.forget()
        self._store.truncate(self._base)

    # -- reads and writes ----------------------------------------------------------------------------

    def _start_read(self, index: int, *, wait: bool) -> _Buffer | None:
        """Begin to read a block; return its buffer, None where none is free and `wait` is False."""
        block = self._blocks[index]
        buffer = self._room(block.nbytes, wait=wait)
        if buffer is not None:
            memory = memory_of(buffer.memory[: block.nbytes])
            buffer.pending = self._threads.submit(self._read, index, memory)
            self._hold(index, buffer, _Role.AHEAD)
        return buffer

    def _read(self, index: int, memory: memoryview) -> None:
        """Read a block. On a thread."""
        start = self._blocks[index].start
        self._store.read(memory, start)
        if self._checksum is not None and (found := self._checksum(memory)) != self._sums[index]:
            raise OffloadError(
                f"offload: block {index} of {self._store.described}, {len(memory)} bytes at "
                f"{start}, has checksum {found}, and {self._sums[index]} when it was written: the disk, or "
                "what is between it and the memory, has changed it"
            )

    def _start_write(self, index: int, buffer: _Buffer) -> None:
        memory = memory_of(buffer.memory[: self._blocks[index].nbytes])
        buffer.pending = self._threads.submit(self._write, index, memory)
        self._hold(index, buffer, _Role.WRITING)

    def _write(self, index: int, memory: memoryview) -> None:
        """Write a block. On a thread."""
        if self._checksum is not None:
            self._sums[index] = self._checksum(memory)
        self._store.write(memory, self._blocks[index].start)

    def _limit_writes(self) -> None:
        """Wait until few enough blocks are being written that the next ones can be read."""
        writing = [item for item in self._held.items() if item[1].role is _Role.WRITING]
        for index, buffer in writing[: max(0, len(writing) - self._prefetch)]:
            self._wait(buffer)
            self._hold(index, buffer, _Role.IDLE)

    def _wait(self, buffer: _Buffer) -> None:
        try:
            buffer.wait()
        except OffloadError as error:
            self._error = error
            raise

    def _raise_earlier(self) -> None:
        if self._error is not None:
            raise self._error

    # -- buffers -------------------------------------------------------------------------------------

    def _hold(self, index: int, buffer: _Buffer, role: _Role) -> None:
        """Note what the buffer of a block is for now; it is the last one that was used."""
        self._held.pop(index, None)
        self._held[index] = buffer
        buffer.role = role

    def _room(self, nbytes: int, *, wait: bool) -> _Buffer | None:
        """Return a buffer that no block needs, of this size at least."""
        buffer = self._free_buffer(nbytes, wait=wait)
        if buffer is not None and buffer.memory.numel() < nbytes:
            buffer.memory = aligned_memory(nbytes)
        return buffer

    def _free_buffer(self, nbytes: int, *, wait: bool) -> _Buffer | None:
        if self._spare:
            return self._spare.pop()
        if self._num_buffers < self._most:
            return self._new_buffer(nbytes)
        for index, buffer in self._held.items():
            if buffer.role is _Role.IDLE or (buffer.role is _Role.WRITING and buffer.is_done):
                return self._take(index)
        if not wait:
            return None
        for role in (_Role.WRITING, _Role.AHEAD):  # wait for the oldest
            for index, buffer in self._held.items():
                if buffer.role is role:
                    return self._take(index)
        return self._new_buffer(nbytes)  # all are in use

    def _take(self, index: int) -> _Buffer:
        """Take the buffer of a block for another one, once it is written or read."""
        self._wait(self._held[index])
        return self._held.pop(index)

    def _new_buffer(self, nbytes: int) -> _Buffer:
        self._num_buffers += 1
        return _Buffer(aligned_memory(max(nbytes, self._block_bytes)))
