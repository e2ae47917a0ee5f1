"""`ShardReduction`: brings what all ranks have of one bucket, combined, to the ranks that own its parts.

A reduce-scatter with parts of any size. On a host every rank adds up what its ranks have for one owner there,
and for the owners elsewhere of which it is the counterpart; these get it in a message. With two hosts of two
ranks, and a bucket of the parts a b c d:

    rank 0, owns a   a0+a1, c0+c1   sends c0+c1 to 2 | gets a2+a3 | a
    rank 1, owns b   b0+b1, d0+d1   sends d0+d1 to 3 | gets b2+b3 | b
    rank 2, owns c   c2+c3, a2+a3   sends a2+a3 to 0 | gets c0+c1 | c
    rank 3, owns d   d2+d3, b2+b3   sends b2+b3 to 1 | gets d0+d1 | d

On one host an owner adds in rank order; between hosts it adds the sums of the hosts in their order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp
from mpisgd.gradients.bucketing import ALIGN_BYTES, Bucket
from mpisgd.sharding.device_parts import DeviceParts
from mpisgd.sharding.division import PieceRange
from mpisgd.sharding.owners import Owners, Transfers
from mpisgd.sharding.reduction.bucket_shard import BucketShard
from mpisgd.transport.host_arithmetic import Arithmetic, prepare
from mpisgd.transport.messages.link import Transfer
from mpisgd.transport.staging_layout import slot_bytes
from mpisgd.transport.torch_reduction import combine_in_rank_order

__all__ = ["DeviceShardReduction", "Scratch", "ShardReduction"]


class _Chunk(NamedTuple):
    """What this rank adds up at once: a part of a bucket, and where it is in the shard of its owner."""

    owner: int
    start: int
    numel: int
    at: int


class Scratch:
    """Memory for partial sums, used again by the next buckets: the queue runs one operation at a time."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._used = self._wanted = 0

    def buffers(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Return uninitialized tensors of so many elements."""
        nbytes = sum(sizes) * dtype.itemsize
        start = -(-self._used // ALIGN_BYTES) * ALIGN_BYTES
        self._used = start + nbytes
        if self._used > self._memory.numel():  # as much as is wanted now is there from the next time on
            return list(torch.split(torch.empty(sum(sizes), dtype=dtype), list(sizes)))
        return list(torch.split(self._memory[start : self._used].view(dtype), list(sizes)))

    def clear(self) -> None:
        """Forget what was returned; it is not used any more."""
        if self._used > self._memory.numel():
            self._memory = torch.empty(self._used, dtype=torch.uint8)
        self._used = 0


class ShardReduction(BucketShard):
    """Combines one bucket again in every step. Each rank keeps its shard: the parts that it owns.

    Args:
        bucket: what travels.
        dtype: of the gradients.
        ranges: what each owner has of all parameters.
        owners: the ranks.
        op: AVG or SUM.
        finish: what is done to the combined parts.
        scratch: for partial sums.
        in_place: whether the shard may lie in the bucket.
        wire: the dtype in which gradients travel.
    """

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        ranges: Sequence[Sequence[PieceRange]],
        owners: Owners,
        op: ReduceOp,
        finish: Callable[[Tensor], None],
        scratch: Scratch,
        *,
        in_place: bool,
        wire: torch.dtype,
    ) -> None:
        super().__init__(bucket, dtype, ranges, owners.rank, finish)
        self._owners, self._op, self._scratch, self._wire = owners, op, scratch, wire
        self._in_place = in_place and len(self._own) == 1
        self._sum: Tensor | None = None  # as it travels
        # Between `begin` and `finish`:
        self._partials: list[Tensor] = []  # what this host has
        self._arrivals: list[Tensor] = []  # what comes from each of the others
        self._incoming: list[Transfer] = []  # of each chunk that this rank owns
        self._outgoing: list[Transfer] = []
        size, alone = owners.group.size, max(map(len, owners.nodes)) == 1
        probe = torch.empty(0, dtype=self._wire)
        self._arithmetic: Arithmetic = prepare(probe, op, size, alone=alone)[1]
        step = slot_bytes(max(map(len, owners.nodes))) // self._arithmetic.partial.itemsize
        self._chunks = [self._chunks_of(speaks_for, step) for speaks_for in owners.represented]

    def _chunks_of(self, owners: Sequence[int], step: int) -> list[_Chunk]:
        return [
            _Chunk(owner, span.start + at, min(step, span.numel - at), span.at + at)
            for owner in owners
            for span in self._spans[owner]
            for at in range(0, span.numel, step)
        ]

    # -- inside the queue ---------------------------------------------------------------------------

    def begin(self, flat: Tensor, transfers: Transfers) -> None:
        """Add up what the ranks of this host have; what goes between hosts is on its way then.

        Args:
            flat: of this rank; it is not read any more after `finish`, unless the shard lies there.
            transfers: take care of what is on its way.

        Cost: with n owners on h hosts of equal size, a rank sends (h - 1) n-th parts of the bucket, and adds
            up as many and one on its host; a barrier for each part that fits in the staging memory.
        """
        self._forget_transfers()  # of one that has failed
        flat = flat.to(self._wire)
        total = self._room(flat)
        if len(self._owners.nodes) == 1:
            self._combine_here(flat, total)
        else:
            self._send_sums(flat, transfers)

    def finish(self) -> None:
        """Add up what comes from the other hosts; after that the shard is complete."""
        assert self._sum is not None
        if len(self._owners.nodes) > 1:
            self._combine_sums(self._sum)
        self._take(self._sum)

    def release(self) -> None:
        """Forget a shard that lies in the bucket."""
        if self._in_place:
            self._sum = self._shard = None

    def _room(self, flat: Tensor) -> Tensor:
        if self._in_place:
            (span,) = self._own
            self._sum = flat[span.start : span.start + span.numel]
        elif self._sum is None:
            self._sum = torch.empty(self._numel, dtype=self._wire)
        return self._sum

    def _combine_here(self, flat: Tensor, total: Tensor) -> None:
        def combine(k: int, everyones: Sequence[Tensor]) -> None:
            chunk = mine[k]
            combine_in_rank_order(everyones, self._op, out=total[chunk.at : chunk.at + chunk.numel])

        mine = self._mine
        self._add_up(flat, combine, in_place=self._in_place)

    @property
    def _mine(self) -> list[_Chunk]:
        return self._chunks[self._owners.here.index(self._owners.rank)]

    def _own_chunks(self, flat: Tensor) -> list[Tensor]:
        return [flat[chunk.start : chunk.start + chunk.numel] for chunk in self._mine]

    def _add_up(
        self, flat: Tensor, combine: Callable[[int, Sequence[Tensor]], None], *, in_place: bool
    ) -> None:
        """Call `combine` for each chunk of this rank with what the ranks of this host have."""
        own, memory = self._own_chunks(flat), self._owners.memory
        if memory is None or len(self._owners.here) == 1:
            for k, chunk in enumerate(own):
                combine(k, [chunk])
            return
        itemsize, address = flat.element_size(), flat.data_ptr()
        ranges = [[(address + c.start * itemsize, c.numel * itemsize) for c in one] for one in self._chunks]
        memory.run_steps(memory.reduce_to_owners(ranges, own, combine, in_place=in_place))

    def _send_sums(self, flat: Tensor, transfers: Transfers) -> None:
        """Add up on this host what it has for each owner, and send each chunk to those elsewhere at once."""
        owners, arithmetic, mine = self._owners, self._arithmetic, self._mine
        as_it_lies = len(owners.here) == 1 and arithmetic.partial == self._wire
        sizes = [] if as_it_lies else [chunk.numel for chunk in mine]
        arriving = [self._numel] * (len(owners.nodes) - 1)
        buffers = self._scratch.buffers([*sizes, *arriving], arithmetic.partial)
        partials, self._arrivals = buffers[: len(sizes)], buffers[len(sizes) :]
        self._partials = self._own_chunks(flat) if as_it_lies else partials
        self._receive_sums(transfers)
        if as_it_lies:
            for k in range(len(mine)):
                self._send_sum(k, transfers)
            return

        def combine(k: int, everyones: Sequence[Tensor]) -> None:
            arithmetic.on_host(everyones, partials[k])
            self._send_sum(k, transfers)

        self._add_up(flat, combine, in_place=False)

    def _send_sum(self, k: int, transfers: Transfers) -> None:
        if (owner := self._mine[k].owner) != self._owners.rank:
            self._outgoing.append(transfers.note(self._owners.begin([(owner, self._partials[k])], [])))

    def _receive_sums(self, transfers: Transfers) -> None:
        """Begin to receive what the other hosts have for this rank, chunk by chunk."""
        owners = self._owners
        hosts = [host for host in range(len(owners.nodes)) if host != owners.host]
        sources = [owners.counterpart(owners.rank, host) for host in hosts]
        for chunk in self._owned_chunks:
            buffers = [arrived[chunk.at : chunk.at + chunk.numel] for arrived in self._arrivals]
            receives = list(zip(sources, buffers, strict=True))
            self._incoming.append(transfers.note(owners.begin([], receives)))

    @property
    def _owned_chunks(self) -> list[_Chunk]:
        return [chunk for chunk in self._mine if chunk.owner == self._owners.rank]

    def _combine_sums(self, total: Tensor) -> None:
        """Add up what all hosts have for this rank, in their order; one chunk while the next ones travel."""
        of_host = [p for c, p in zip(self._mine, self._partials, strict=True) if c.owner == self._owners.rank]
        for chunk, partial, incoming in zip(self._owned_chunks, of_host, self._incoming, strict=True):
            incoming.wait()
            stop = chunk.at + chunk.numel
            everyones = [arrived[chunk.at : stop] for arrived in self._arrivals]
            everyones.insert(self._owners.host, partial)
            self._arithmetic.across(everyones, total[chunk.at : stop])
        for outgoing in self._outgoing:
            outgoing.wait()
        self._forget_transfers()

    def _forget_transfers(self) -> None:
        self._partials, self._arrivals, self._incoming, self._outgoing = [], [], [], []


class DeviceShardReduction(BucketShard):
    """Combines one bucket again in every step, by the group's own collectives; see `DeviceParts`.

    Args:
        bucket: what travels.
        dtype: of the gradients.
        ranges: what each rank has of all parameters.
        group: the ranks.
        op: AVG or SUM.
        finish: what is done to the combined parts.
        wire: the dtype in which gradients travel.
    """

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        ranges: Sequence[Sequence[PieceRange]],
        group: Group,
        op: ReduceOp,
        finish: Callable[[Tensor], None],
        wire: torch.dtype,
    ) -> None:
        super().__init__(bucket, dtype, ranges, group.rank, finish)
        self._group, self._op, self._wire = group, op, wire

    def begin(self, flat: Tensor, operation: Operation) -> Work | None:
        """Begin to combine what all ranks have; the shard is complete when somebody has waited.

        Args:
            flat: of this rank.
            operation: what the ranks must agree on.
        """
        if not flat.numel():
            self._take(flat)
            return None
        return DeviceParts(self.everyones(flat), self._group).reduce_scatter(
            self._op, operation, self._wire, self._take
        )

    def release(self) -> None:
        """Forget the shard."""
        self._shard = None
