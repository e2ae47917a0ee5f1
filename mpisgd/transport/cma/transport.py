"""`CmaTransport`: the all-reduce of the ranks of a host in each other's memory, without staging memory.

A rank reads a chunk of its part from all others, combines it with its own, and writes the result to all
others, before the next chunk. Nobody waits for anybody between the beginning and the end:

    rank 0   check | read(0) add(0) write(0) | read(1) add(1) write(1) | ... | barrier
    rank 1   check | read(0) add(0) write(0) | read(1) add(1) write(1) | ... | barrier
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from mpisgd.dtypes import ReduceOp
from mpisgd.interfaces.host_transport import HostTransport, Region, Steps
from mpisgd.transport.cma.cross_memory_attach import CrossMemoryAttach, open_cross_memory_attach
from mpisgd.transport.cma.peer_access import PeerAccess
from mpisgd.transport.members import Members
from mpisgd.transport.messages.link import even_ranges
from mpisgd.transport.shm.reduction import all_reduce_in_parts
from mpisgd.transport.shm.staging import copy_bytes, prefetch, typed_pieces
from mpisgd.transport.shm.transport import ShmTransport
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["CmaTransport"]

CHUNK_BYTES = 2**18
SCRATCH_BYTES = 2**20  # of all pieces of a chunk together, which should stay in a core's cache
ALIGN_BYTES = 64


# Torch puts tensors of 2 MiB, a huge page, and more into such pages; the ends of smaller ones lie in others.
IN_HUGE_PAGES_BYTES = 8 * 2**20


class CmaTransport(HostTransport):
    """The ranks of a group that share a host and may reach each other's memory.

    Args:
        shm: their shared memory: how they wait for each other, and what they use for what cannot be reached.
        memory: of their processes.

    Attributes:
        access: what the others may reach of this rank's memory.
        huge_pages: whether large tensors lie in huge pages, on all ranks.
    """

    name = "direct"
    spans_hosts = False
    shares_memory = True

    def __init__(self, shm: ShmTransport, memory: CrossMemoryAttach) -> None:
        self.access = PeerAccess(shm.control)
        self.huge_pages = memory.huge_pages
        self._shm = shm
        self._memory = memory
        self._rank, size = shm.rank, shm.size
        self._others = [*range(shm.rank + 1, size), *range(shm.rank)]  # not all begin with the same
        self._chunk_bytes = min(CHUNK_BYTES, SCRATCH_BYTES // size // ALIGN_BYTES * ALIGN_BYTES)
        with torch.inference_mode(False):
            scratch = torch.empty(size * self._chunk_bytes, dtype=torch.uint8)
        slots = scratch.view(size, self._chunk_bytes).unbind()
        self._addresses = [slot.data_ptr() for slot in slots]
        # Of the scratch memory, for everyone's; nearly all chunks have the same length.
        self._pieces = lru_cache(2)(lambda numel, dtype: typed_pieces(slots, numel, dtype, (0,) * size))

    @classmethod
    def open(cls, members: Members, opened: Sequence[HostTransport]) -> "CmaTransport | None":
        """Open it where all ranks are on one host and can reach each other's memory; else None on all."""
        for shm in opened:
            if isinstance(shm, ShmTransport):
                memory = open_cross_memory_attach(shm.communicator)
                return None if memory is None else cls(shm, memory)
        return None

    @property
    def memory(self) -> ShmTransport:
        """How they wait for each other."""
        return self._shm

    @property
    def digest_exchange(self) -> None:
        """They have that of their shared memory."""
        return None

    def takes(self, collective: str, dtype: torch.dtype | None, nbytes: int) -> bool:
        """An all-reduce, and nothing else."""
        return collective == "all_reduce"

    def suits_uncached(self, flat: Tensor) -> bool:
        """Return whether the kernel finds a tensor in huge pages.

        What has left the caches takes shared memory as long as this (on 2 cores 2 and 4 ranks took 0.93 of
        the time, 3 ranks 1.3), but for what lies in huge pages (1.13, 1.2 and 1.6).
        """
        return self.huge_pages and flat.nbytes >= IN_HUGE_PAGES_BYTES

    def run_steps(self, steps: Steps) -> None:
        """Run an operation to its end, with a barrier wherever it yields."""
        self._shm.run_steps(steps)

    def all_reduce_now(self, flat: Tensor, op: ReduceOp, region: Region | None = None) -> None:
        """See `HostTransport`; in a region all ranks reach it anyway."""
        if region is None:
            self.run_steps(self.all_reduce(flat, op))
        else:
            self._shm.all_reduce_now(flat, op, region)

    def revoke(self) -> None:
        """Let no other rank reach this one's memory any more."""
        self.access.revoke()

    def guarded(self, *, alone: bool = False) -> Sequence[Tensor]:
        """What is guarded of the shared memory."""
        return self._shm.guarded(alone=alone)

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Iterator[None]:
        """Combine contiguous `flat` [n], of the CPU and any reducible dtype, over the ranks, in place.

        Every rank combines its own part for all, in everyone's memory; where some rank's tensor cannot be
        reached, they go through the staging memory. It yields wherever all ranks of the host must have
        arrived; the first time is the consistency check.

        Cost: two barriers; three passes over the message, two of them in cache.
        """
        address = self.reachable_address(flat)
        self.access.grant(flat if address else None, address)  # the caller revokes it, if something raises
        yield
        addresses = self.access.addresses()
        if not all(addresses):
            self.access.end()
            yield from all_reduce_in_parts(self._shm, flat, op)
            return
        self._combine_part(flat, op, addresses)
        yield
        self.access.end()

    def reachable_address(self, flat: Tensor) -> int:
        """Return the address of a tensor, 0 where the others cannot reach it."""
        address = flat.data_ptr()
        return address if not self.access.is_revoked and self._memory.is_mine(address, flat.nbytes) else 0

    def _combine_part(self, flat: Tensor, op: ReduceOp, addresses: Sequence[int]) -> None:
        first, last = even_ranges(flat.numel(), self._shm.size)[self._rank]
        step = self._chunk_bytes // flat.element_size()
        for start, mine in zip(
            itertools.count(first, step), torch.split(flat[first:last], step), strict=False
        ):
            here = [address + start * flat.element_size() for address in addresses]
            if not self.access.begin_access():
                return  # one has left; all others wait for it at the end
            self.combine(mine, here, op)
            for rank in self._others:
                self._memory.write(rank, here[rank], here[self._rank], mine.nbytes)
            self.access.end_access()

    def combine(self, mine: Tensor, addresses: Sequence[int], op: ReduceOp) -> None:
        """Combine a chunk `mine` [n] with those of the others, at `addresses`, into this rank's."""
        nbytes = mine.nbytes
        for rank in self._others:
            self._memory.read(rank, self._addresses[rank], addresses[rank], nbytes)
        pieces = self._pieces(mine.numel(), mine.dtype).copy()
        result, pieces[self._rank] = pieces[self._rank], mine
        prefetch(mine)
        if self._rank < 2:  # the first two are read before anything is written
            combine_in_rank_order(pieces, op, out=mine)
        else:
            combine_in_rank_order(pieces, op, out=result)
            copy_bytes(addresses[self._rank], self._addresses[self._rank], nbytes)
