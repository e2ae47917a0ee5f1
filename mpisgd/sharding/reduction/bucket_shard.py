"""`BucketShard`: the part of a bucket of gradients that this rank owns, combined over all ranks."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.gradients.bucketing import ALIGN_BYTES, Bucket
from mpisgd.sharding.division import Member, PieceRange

__all__ = ["BucketShard", "Span"]


class Span(NamedTuple):
    """Consecutive elements of a bucket with one owner, and where they are in its shard."""

    start: int
    numel: int
    at: int


class BucketShard:
    """Where the parts of each owner are in a bucket, and those of this rank, once they are combined.

    Args:
        bucket: what travels.
        dtype: of the gradients.
        ranges: what each owner has of all parameters.
        rank: the number of this one.
        finish: what is done to the combined parts.
    """

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        ranges: Sequence[Sequence[PieceRange]],
        rank: int,
        finish: Callable[[Tensor], None],
    ) -> None:
        self._offsets = dict(zip(bucket.indices, bucket.offsets, strict=True))
        self._dtype, self._finish = dtype, finish
        self._spans = [self._spans_of(of_one) for of_one in ranges]
        self._own = self._spans[rank]
        self._numel = sum(span.numel for span in self._own)
        self._padding = list(self._padding_of(ranges[rank]))
        self._begins: dict[tuple[Member, Member], int | None] = {}
        self._shard: Tensor | None = None

    def _spans_of(self, ranges: Sequence[PieceRange]) -> list[Span]:
        """Return where the parts of an owner are in the bucket, neighbours with their padding as one."""
        spans: list[Span] = []
        for start, numel in self._places_of(ranges):
            last = spans[-1] if spans else None
            if last is not None and start - (last.start + last.numel) < self._most_padding:
                spans[-1] = last._replace(numel=start + numel - last.start)
            else:
                spans.append(Span(start, numel, 0 if last is None else last.at + last.numel))
        return spans

    def _places_of(self, ranges: Sequence[PieceRange]) -> list[tuple[int, int]]:
        """Return the start and the elements of the parts of an owner in the bucket, in their order there."""
        members = [m for range_ in ranges for m in range_.members if m.param in self._offsets and m.numel]
        return sorted((self._offsets[m.param] + m.first, m.numel) for m in members)

    @property
    def _most_padding(self) -> int:
        """More elements than lie between neighbours."""
        return ALIGN_BYTES // self._dtype.itemsize

    def _padding_of(self, ranges: Sequence[PieceRange]) -> Iterator[tuple[int, int]]:
        """Yield the start and the end, in the shard, of what lies between parts of an owner."""
        places = self._places_of(ranges)
        at = sum(places[0][1:]) if places else 0
        for (start, numel), (next_start, next_numel) in itertools.pairwise(places):
            gap = next_start - (start + numel)
            if 0 < gap < self._most_padding:
                yield at, at + gap
                at += gap
            at += next_numel

    def _take(self, combined: Tensor) -> None:
        """Keep what came out, [numel], which may have travelled in less precision."""
        if combined.dtype == self._dtype:
            self._shard = combined
        elif self._shard is None:
            self._shard = combined.to(self._dtype)
        else:
            self._shard.copy_(combined)
        shard = self._shard
        if shard.numel():
            self._finish(shard)
        if self._padding:  # other buckets may have been in the same memory
            torch._foreach_zero_([shard[start:end] for start, end in self._padding])

    # -- what came out ------------------------------------------------------------------------------

    def covers(self, param: int) -> bool:
        """Return whether a parameter is in the bucket."""
        return param in self._offsets

    def part(self, members: Sequence[Member]) -> Tensor:
        """Return the combined gradient of parts that this rank owns, as they lie in a piece; after `finish`.

        Args:
            members: of a piece, from its first on.

        Returns:
            [n], up to the end of the last member; a copy where they do not lie so in the bucket.
        """
        assert self._shard is not None
        first, last = members[0], members[-1]
        if not first.numel:
            return self._shard[:0]
        begin = self._begin_of(members)
        if begin is not None:
            return self._shard[begin + first.at : begin + last.at + last.numel]
        joined = self._shard.new_zeros(last.at + last.numel)
        for member in members:
            joined[member.at : member.at + member.numel] = self.part([member])
        return joined

    def _begin_of(self, members: Sequence[Member]) -> int | None:
        """Return where a piece would begin in the shard, None where it does not lie there as a whole."""
        key = (members[0], members[-1])
        if key not in self._begins:  # there may be hundreds, and every step asks
            begins = {self._at(member) - member.at for member in members}
            self._begins[key] = begins.pop() if len(begins) == 1 else None
        return self._begins[key]

    def _at(self, member: Member) -> int:
        """Return where a part begins in the shard."""
        start = self._offsets[member.param] + member.first
        span = next(s for s in self._own if s.start <= start < s.start + s.numel)
        return span.at + start - span.start

    def release(self) -> None:
        """Forget a shard whose memory is not its own."""

    def everyones(self, flat: Tensor) -> list[list[Tensor]]:
        """Return where the shard of each owner is in a bucket, for `Owners.exchange`."""
        return [[flat[s.start : s.start + s.numel] for s in of_one] for of_one in self._spans]

    def put_back(self, flat: Tensor) -> None:
        """Copy this rank's shard to its place in a bucket."""
        assert self._shard is not None
        for span in self._own:
            flat[span.start : span.start + span.numel] = self._shard[span.at : span.at + span.numel]
