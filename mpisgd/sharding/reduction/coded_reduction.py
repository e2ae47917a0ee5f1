"""`CodedShardReduction`: what hosts send each other of a bucket travels as codes of a few bits per element.

    rank 0, owns a   S0 = a0+a1                                    a = S0 + C(S1)
    rank 2, owns c   S1 = a2+a3    sends C(S1) to 0                  on the host of the owner nothing is coded

The ranks of a host add up in shared memory, as they do without codes, and what an owner has to get of another
host travels in one message. On one host nothing travels, and no bit differs.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.compress.code import Code
from mpisgd.errors import InvalidArgument
from mpisgd.sharding.divided_parameters import Named
from mpisgd.sharding.division import PieceRange
from mpisgd.sharding.owners import Owners, Transfers
from mpisgd.sharding.reduction.shard_reduction import ShardReduction

__all__ = ["CodedShardReduction", "MakeShardCode", "check_codable"]

MakeShardCode = Callable[[Sequence[int], torch.dtype], Code]  # of pieces of these lengths


def check_codable(named: Named) -> None:
    """Raise unless there are codes of all parameters.

    Raises:
        InvalidArgument: names one of which there is none.
    """
    for name, param in named:
        if on_device(param) or param.dtype not in (torch.float32, torch.float64):
            raise InvalidArgument(
                f"Sharded: codes between hosts do not go with {name}, {param.dtype} on {param.device}; "
                "expected float32 or float64 on the CPU"
            )


class CodedShardReduction(ShardReduction):
    """Combines one bucket again in every step; see `ShardReduction`.

    Args:
        ranges: as there, as for `owners` and `options`.
        owners: the ranks.
        make_code: makes the code of an owner's shard, of the lengths of the parts of parameters in it.
        options: the other arguments.
    """

    def __init__(
        self,
        *,
        ranges: Sequence[Sequence[PieceRange]],
        owners: Owners,
        make_code: MakeShardCode,
        **options: Any,
    ) -> None:
        super().__init__(ranges=ranges, owners=owners, **options)
        self._parts = {owner: self._parts_of(ranges[owner], owner) for owner in owners.mine}
        self._codes = {
            owner: make_code([numel for _, numel in parts], self._arithmetic.total)
            for owner, parts in self._parts.items()
        }
        # Between `begin` and `finish`:
        self._sums: dict[int, Tensor] = {}  # of this host, for each owner that this rank adds up for
        self._messages: list[Tensor] = []  # from each of the others

    def _parts_of(self, ranges: Sequence[PieceRange], owner: int) -> list[tuple[int, int]]:
        """Return the parts of parameters in the shard of an owner: where each begins, and its elements."""
        members = [m for range_ in ranges for m in range_.members if m.param in self._offsets and m.numel]
        members.sort(key=lambda m: self._offsets[m.param] + m.first)
        parts: list[tuple[int, int]] = []
        before = None
        for member in members:
            if before is not None and before.param == member.param:  # pieces cut it, and blocks go on
                parts[-1] = parts[-1][0], parts[-1][1] + member.numel
            else:
                parts.append(
                    (self._place_in(owner, self._offsets[member.param] + member.first), member.numel)
                )
            before = member
        return parts

    def _place_in(self, owner: int, start: int) -> int:
        span = next(s for s in self._spans[owner] if s.start <= start < s.start + s.numel)
        return span.at + start - span.start

    # -- inside the queue ---------------------------------------------------------------------------

    def _send_sums(self, flat: Tensor, transfers: Transfers) -> None:
        """Add up on this host what it has for each owner, and send those elsewhere the code of it."""
        owners, mine, wide = self._owners, self._mine, self._arithmetic.total
        numels = [sum(span.numel for span in self._spans[owner]) for owner in owners.mine]
        self._sums = dict(zip(owners.mine, self._scratch.buffers(numels, wide), strict=True))
        self._receive_sums(transfers)

        def combine(k: int, everyones: Sequence[Tensor]) -> None:
            chunk = mine[k]
            self._arithmetic.on_host(everyones, self._sums[chunk.owner][chunk.at : chunk.at + chunk.numel])

        self._add_up(flat, combine, in_place=False)
        for owner in owners.mine[1:]:
            if self._codes[owner].numel:
                message = self._new_message(owner)
                self._codes[owner].encode(self._packed(owner), message)
                self._outgoing.append(transfers.note(owners.begin([(owner, message)], [])))

    def _receive_sums(self, transfers: Transfers) -> None:
        """Begin to receive what the other hosts have for this rank."""
        owners = self._owners
        if not self._codes[owners.rank].numel:
            return
        sources = [
            owners.counterpart(owners.rank, host) for host in range(len(owners.nodes)) if host != owners.host
        ]
        self._messages = [self._new_message(owners.rank) for _ in sources]
        receives = list(zip(sources, self._messages, strict=True))
        self._incoming.append(transfers.note(owners.begin([], receives)))

    def _new_message(self, owner: int) -> Tensor:
        return torch.empty(self._codes[owner].nbytes, dtype=torch.uint8)

    def _packed(self, owner: int) -> Tensor:
        """Return the sums for an owner without the padding, which may hold anything."""
        return torch.cat([self._sums[owner][at : at + numel] for at, numel in self._parts[owner]])

    def _combine_sums(self, total: Tensor) -> None:
        """Add up what all hosts have for this rank, in their order."""
        for transfer in (*self._incoming, *self._outgoing):
            transfer.wait()
        if self._messages:
            everyones = [self._decoded(message) for message in self._messages]
            everyones.insert(self._owners.host, self._sums[self._owners.rank])
            self._arithmetic.across(everyones, total)
        self._forget_transfers()

    def _decoded(self, message: Tensor) -> Tensor:
        rank = self._owners.rank
        values, at_packed = self._codes[rank].decode(message), 0
        shard = values.new_zeros(self._numel)
        for at, numel in self._parts[rank]:
            shard[at : at + numel] = values[at_packed : at_packed + numel]
            at_packed += numel
        return shard

    def _forget_transfers(self) -> None:
        super()._forget_transfers()
        self._sums, self._messages = {}, []
