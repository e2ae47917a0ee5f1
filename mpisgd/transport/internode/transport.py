"""`InternodeTransport`: the all-reduce of ranks on several hosts: on the host, across the hosts, on the host.

A message goes through in chunks, several of which are in flight at once, so that memory and link work at the
same time. What a chunk passes through:

    rank 0 of a host   in | sum of own part | leader: exchange with other hosts ..... | out
    rank 1 of a host   in | sum of own part |                                         | out
                          barrier           barrier                        rank 0 has finished

    chunk              0    1    2    0's result   3    1's result   4   ...                 (two in flight)

The sums of a host lie in a slot of its shared memory, where its leaders send them from and receive the
results into. Where a host has several leaders, each has its own piece of every chunk. A rank that is alone on
its host sends and receives in the message itself.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.dtypes import HALF_DTYPES, SUMMED_IN_FLOAT32, ReduceOp
from mpisgd.errors import CollectiveTimeout
from mpisgd.interfaces.host_transport import HostTransport
from mpisgd.interfaces.host_transport import Region as AnyRegion
from mpisgd.threads.waiting import SHORT_YIELD_S, Backoff
from mpisgd.transport.host_arithmetic import Arithmetic, prepare
from mpisgd.transport.internode.digest_exchange import InternodeDigestExchange
from mpisgd.transport.internode.doubling_exchange import DoublingExchange
from mpisgd.transport.internode.leader import Leader
from mpisgd.transport.internode.leader_exchange import (
    MESSAGE_BYTES,
    PAYLOAD_BYTES,
    HostMessages,
    LeaderExchange,
    Payload,
)
from mpisgd.transport.internode.piece_exchange import PieceExchange, exchange_of
from mpisgd.transport.internode.schedule import FEW_HOSTS, chunk_bytes
from mpisgd.transport.ipc.segment import Segment
from mpisgd.transport.members import Members
from mpisgd.transport.messages.link import even_ranges
from mpisgd.transport.shm.staging import copy_bytes
from mpisgd.transport.shm.transport import ShmTransport, open_host_memory
from mpisgd.transport.torch_reduction import Finish

__all__ = ["InternodeTransport", "memory_bytes"]

DEPTH = 4  # chunks in flight between the hosts
# A chunk's slot is filled while those in flight are still in theirs.
NUM_SLOTS = DEPTH + 1


def slots_bytes(num_hosts: int) -> int:
    """Return the bytes of all slots."""
    return NUM_SLOTS * 2 * chunk_bytes(num_hosts)


def num_messages_kept(num_hosts: int) -> int:
    """Return how many small messages have a place: of few hosts each one's, else the result and another."""
    return num_hosts if num_hosts <= FEW_HOSTS else 2


def memory_bytes(num_hosts: int) -> int:
    """Return the shared memory of a host's ranks between hosts; what is not touched takes no room."""
    return slots_bytes(num_hosts) + num_messages_kept(num_hosts) * MESSAGE_BYTES


FINISHED = 16  # a word of the control block: how many results a leader has received, ever


class _InFlight(NamedTuple):
    """A chunk between the hosts: where its result will be, and where that must go."""

    result: Tensor
    target: Tensor
    exchange: PieceExchange | None


class InternodeTransport(HostTransport):
    """The ranks of a group, which live on several hosts.

    Methods are called inside the queue, after the consistency check, by all ranks alike. They take contiguous
    CPU tensors.

    Args:
        members: the ranks.
        shm: the shared memory of this host's ranks; None where this rank is alone on it.
        memory: more of it, `memory_bytes` for the first rank; None likewise.

    Attributes:
        shm: as given.
        leader_exchange: of the hosts' first ranks; None on others.
        max_num_leaders: how many there can be: the ranks of the smallest host.
    """

    name = "hierarchical"
    spans_hosts = True
    shares_memory = True

    def __init__(self, members: Members, shm: ShmTransport | None, memory: Segment | None) -> None:
        communicator, topology = members.communicator, members.topology
        self.shm = shm
        self.max_num_leaders = min(map(len, topology.nodes))
        self._best_num_leaders = members.best_num_leaders
        self._num_leaders = 1
        self._communicator = communicator
        self._topology = topology
        self._all_alone = max(map(len, topology.nodes)) == 1
        self._name = members.name
        self._timeout_s = members.timeout_s
        self._local_rank = topology.local_rank
        self._leader = Leader(
            communicator,
            [ranks[min(self._local_rank, self.max_num_leaders - 1)] for ranks in topology.nodes],
            topology.node_rank,
        )
        self._in_flight: deque[_InFlight] = deque()
        self._filled = 0  # slots, ever
        self._finished = 0
        num_hosts = topology.num_nodes
        self._is_direct, self._chunk_bytes = num_hosts <= FEW_HOSTS, chunk_bytes(num_hosts)
        room = memoryview(bytearray(num_messages_kept(num_hosts) * MESSAGE_BYTES))
        if shm is not None:
            assert memory is not None
            slots = memory.share(0)[: slots_bytes(num_hosts)].view(NUM_SLOTS, 2, self._chunk_bytes)
            room = memoryview(memory.memory)[slots_bytes(num_hosts) :]
            self._slots = [tuple(slot) for slot in slots]
            self._progress_alone = shm.control.progress
            shm.control.progress = self._progress
        self._messages = HostMessages(room, num_messages_kept(num_hosts))
        self.leader_exchange: LeaderExchange | DoublingExchange | None = None
        if self._local_rank == 0:
            kind = LeaderExchange if self._is_direct else DoublingExchange
            self.leader_exchange = kind(self._leader, self._messages)
        first = communicator.global_ranks[topology.nodes[topology.node_rank][0]]
        control = None if shm is None else shm.control
        self._digest_exchange = InternodeDigestExchange(control, self.leader_exchange, first)

    @classmethod
    def open(cls, members: Members, opened: Sequence[HostTransport]) -> "InternodeTransport | None":
        """Open it where there are several hosts; None on all ranks where those of one cannot share memory."""
        topology = members.topology
        if topology.num_nodes == 1:
            return None
        shm = open_host_memory(members)
        more = None if shm is None else shm.open_segment(memory_bytes(topology.num_nodes))
        if not all(members.communicator.all_gather_object(more is not None or topology.local_size == 1)):
            if shm is not None:
                shm.close()
            return None
        return cls(members, shm, more)

    @property
    def memory(self) -> ShmTransport | None:
        """The memory of this host's ranks."""
        return self.shm

    @property
    def digest_exchange(self) -> InternodeDigestExchange:
        """In memory on each host, by messages between them."""
        return self._digest_exchange

    def takes(self, collective: str, dtype: torch.dtype | None, nbytes: int) -> bool:
        """An all-reduce, and nothing else."""
        return collective == "all_reduce"

    def use_leaders(self, best: Callable[[int, bool], int]) -> None:
        """See `HostTransport`."""
        self._best_num_leaders = best

    def guarded(self, *, alone: bool = False) -> Sequence[Tensor]:
        """What is guarded of the shared memory of this host."""
        return () if self.shm is None else self.shm.guarded(alone=alone)

    def close(self) -> None:
        """Free the communicator of this host. Collective."""
        if self.shm is not None:
            self.shm.control.progress = self._progress_alone  # else the two keep each other
            self.shm.close()

    def _prepare(self, flat: Tensor, op: ReduceOp) -> tuple[Tensor, Arithmetic, Finish]:
        return prepare(flat, op, self._topology.size, alone=self._all_alone)

    # -- large messages -----------------------------------------------------------------------------

    def all_reduce(self, flat: Tensor, op: ReduceOp) -> Iterator[None]:
        """Combine `flat` [n], of any reducible dtype, over the ranks, in place; yields for the
        consistency check.

        Cost: as `all_reduce_now`; a small one takes the check's messages, see `LeaderExchange` and, for more
        than FEW_HOSTS hosts, `DoublingExchange`.
        """
        widest = 4 if flat.dtype in SUMMED_IN_FLOAT32 else flat.element_size()
        if flat.numel() * widest <= PAYLOAD_BYTES:
            yield from self._small(flat, op)
        else:
            yield
            self.all_reduce_now(flat, op)

    def run_steps(self, steps: Iterator[None]) -> None:
        """Finish an operation after its consistency check, where alone it yields."""
        next(steps, None)

    def all_reduce_now(self, flat: Tensor, op: ReduceOp, region: AnyRegion | None = None) -> None:
        """See `HostTransport`; to ranks that are alone on their host it is the same with a region.

        Cost: with h hosts, 2 (h - 1) / h * n elements leave each host (16-bit floats: as float32 on the first
        half of the way, unless every rank is alone); two barriers on the host per chunk of
        `schedule.chunk_bytes`, and `schedule.num_messages` of each leader.
        """
        work, arithmetic, finish = self._prepare(flat, op)
        if region is None:
            self._in_chunks(work, arithmetic, lambda chunk: self._staged(work[chunk]))
        else:
            assert work.data_ptr() == region.mine.data_ptr()
            everyones = region.everyones
            self._in_chunks(work, arithmetic, lambda chunk: [other[chunk] for other in everyones])
        result = finish(work)
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result)

    def _in_chunks(
        self, work: Tensor, arithmetic: Arithmetic, pieces_of: Callable[[slice], list[Tensor]]
    ) -> None:
        """Let the chunks of `work` pass; `pieces_of` returns those of this host's ranks, all being there."""
        best = self._best_num_leaders(work.nbytes, work.dtype in HALF_DTYPES)
        self._num_leaders = max(1, min(best, self.max_num_leaders))
        step = self._chunk_bytes // arithmetic.partial.itemsize
        try:
            for start in range(0, work.numel(), step):
                chunk = slice(start, min(work.numel(), start + step))
                if len(self._in_flight) == DEPTH:
                    self._collect()
                self._contribute(chunk, work[chunk], arithmetic, pieces_of)
            while self._in_flight:
                self._collect()
        finally:  # of what is in flight, if anything is, MPI may still write to the memory
            exchanges = [exchange for _, _, exchange in self._in_flight if exchange is not None]
            if requests := [request for exchange in exchanges for request in exchange.requests]:
                self._communicator.abandon(requests, list(self._in_flight))
            self._in_flight.clear()

    def _staged(self, mine: Tensor) -> list[Tensor]:
        """Return the pieces of this host's ranks, this one's `mine`, in staging memory."""
        assert self.shm is not None
        copy_bytes(self.shm.next_addresses()[self.shm.rank], mine.data_ptr(), mine.nbytes)
        self.shm.barrier()
        self.shm.swap_buffers()
        return self.shm.pieces(mine.numel(), mine.dtype)

    def _contribute(
        self, chunk: slice, mine: Tensor, arithmetic: Arithmetic, pieces_of: Callable[[slice], list[Tensor]]
    ) -> None:
        """Add up a chunk on this host and start its exchange."""
        if self.shm is None:
            partial = mine if mine.dtype == arithmetic.partial else mine.to(arithmetic.partial)
            result = mine
        else:
            partial, result = self._slot(mine, arithmetic.partial)
            pieces = pieces_of(chunk)
            own = slice(*even_ranges(mine.numel(), self.shm.size)[self.shm.rank])
            arithmetic.on_host([piece[own] for piece in pieces], partial[own])
            self.shm.barrier()
        exchange = None
        if self._local_rank < self._num_leaders:
            piece = slice(*even_ranges(mine.numel(), self._num_leaders)[self._local_rank])
            exchange = exchange_of(self._leader, partial[piece], result[piece], arithmetic)
        self._in_flight.append(_InFlight(result, mine, exchange))

    def _slot(self, mine: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return shared memory for the next chunk: for the sums of this host, and for the result."""
        sums, results = self._slots[self._filled % NUM_SLOTS]
        self._filled += 1
        partial = sums.view(dtype)[: mine.numel()]
        return partial, partial if mine.dtype == dtype else results.view(mine.dtype)[: mine.numel()]

    def _collect(self) -> None:
        """Wait for the oldest chunk in flight and copy its result out."""
        oldest = self._in_flight[0]
        if oldest.exchange is not None:
            self._wait(self._advance, [rank for _, rank in self._leader.others])
        self._in_flight.popleft()
        if self.shm is None:
            return
        self._finished += 1
        control, finished, leaders = self.shm.control, self._finished, range(self._num_leaders)
        if oldest.exchange is not None:
            control.publish(FINISHED, finished)
        self._wait(
            lambda: control.reached(FINISHED, leaders, finished),
            self._topology.nodes[self._topology.node_rank][: self._num_leaders],
            lambda limit_s: control.sleep_until_reached(FINISHED, leaders, finished, limit_s),
        )
        oldest.target.copy_(oldest.result)

    def _advance(self) -> bool:
        """Advance everything in flight; return whether the oldest is there."""
        oldest, *later = [exchange for _, _, exchange in self._in_flight]
        assert oldest is not None
        done, before = oldest.advance(), oldest
        for exchange in later:
            assert exchange is not None
            exchange.advance(before.num_begun)
            before = exchange
        return done

    def _progress(self) -> None:
        """Advance messages while this rank waits for others of its host."""
        if self._in_flight and self._in_flight[0].exchange is not None:
            self._advance()
        else:
            self._communicator.progress()

    # -- small messages -----------------------------------------------------------------------------

    def _small(self, flat: Tensor, op: ReduceOp) -> Iterator[None]:
        """Combine a small message over the ranks, in place: the hosts' sums travel with the check.

        Between few hosts every rank adds them up for itself, which takes less time than waiting for one that
        does.
        """
        work, arithmetic, finish = self._prepare(flat, op)
        dtype = arithmetic.partial if self._is_direct else arithmetic.total
        payloads = self._messages.payloads(work.numel(), dtype)
        if self.shm is not None:
            copy_bytes(self.shm.next_addresses()[self.shm.rank], work.data_ptr(), work.nbytes)
        if self.leader_exchange is not None:
            mine = payloads[self._leader.host if self._is_direct else 0]
            passing_on = arithmetic._replace(divisor=1)
            self.leader_exchange.payload = Payload(
                lambda: self._add_up_here(work, arithmetic, mine),
                lambda first, second: passing_on.across((payloads[first], payloads[second]), mine),
            )
        yield
        if self.shm is not None:
            self.shm.swap_buffers()
        if self._is_direct:
            arithmetic.across_unchanged(payloads, work)
        else:
            arithmetic.round_off(payloads[0], work)
        result = finish(work)
        if result.data_ptr() != flat.data_ptr():
            flat.copy_(result)

    def _add_up_here(self, work: Tensor, arithmetic: Arithmetic, place: Tensor) -> int:
        """Write what the small messages of this host's ranks add up to into its payload; return the bytes."""
        if self.shm is None and place.dtype == work.dtype:
            copy_bytes(place.data_ptr(), work.data_ptr(), work.nbytes)
        else:
            pieces = [work] if self.shm is None else self.shm.next_pieces(work.numel(), work.dtype)
            arithmetic.on_host(pieces, place)
        return place.nbytes

    # -- waiting ------------------------------------------------------------------------------------

    def _wait(
        self,
        ready: Callable[[], bool],
        others: Sequence[int],
        sleep: Callable[[float], bool] | None = None,
    ) -> None:
        """Wait for one of the ranks `others`, in the middle of an operation."""
        if ready() or Backoff(self._timeout_s).wait_for(ready, sleep, yield_s=SHORT_YIELD_S):
            return
        names, rank = self._communicator.global_ranks, self._communicator.rank
        raise CollectiveTimeout(
            f"group '{self._name}': rank {names[rank]} has waited {self._timeout_s:.1f} s in the "
            f"middle of an operation for one of the ranks {[names[other] for other in others]}"
        )
