"""Parts of device tensors: combined for the ranks that own them, and gathered from these.

Where all ranks own about equally much, it travels in slices of one size, by a reduce-scatter or an all-gather
of the group, which NCCL does where there is one:

    owned     | owner 0 .... | owner 1 ... | owner 2 .... |
    travels   | owner 0 .... | owner 1 ... pad | owner 2 .... |

Otherwise each owner's part travels by itself, by a reduction to it or a broadcast from it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import as_one, cut_by
from mpisgd.collectives.all_gather import ALL_GATHER_INTO
from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.dispatch import Call, device_kind, run
from mpisgd.collectives.reduce import reduce
from mpisgd.collectives.reduce_scatter import REDUCE_SCATTER
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, dtype_name
from mpisgd.transport.device.device_work import DeviceWork

__all__ = ["DeviceParts", "PartsWork"]

SMALL = 4096  # elements of a slice that are never too many


class PartsWork(DeviceWork):
    """Several operations, and what follows when all are done.

    Args:
        works: the operations; None for one that is done.
        then: called once, on the stream of whoever waits first.
        memory: that `then` uses.
        like: a tensor of the group's, on the device.
        group: of the operations.
    """

    def __init__(
        self,
        works: Sequence[Work | None],
        then: Callable[[], None],
        memory: Sequence[Tensor],
        like: Tensor,
        group: Group,
    ) -> None:
        super().__init__(then, group=group, tensors=[], memory=memory, device=like.device)
        self._works = [work for work in works if work is not None]

    def follow(self, timeout_s: float | None = None) -> None:
        """See `DeviceWork`; the limit is that of each operation."""
        for work in self._works:
            work.wait(timeout_s)

    def is_completed(self) -> bool:
        """Return whether all operations are done."""
        return all(work.is_completed() for work in self._works)

    @property
    def error(self) -> BaseException | None:
        """What went wrong first, None if nothing has."""
        return next((work.error for work in self._works if work.error is not None), None)


class DeviceParts:
    """What each rank owns of some device tensors.

    Args:
        buffers: for each rank contiguous tensors [n], of one dtype, of the same sizes on all ranks.
        group: the ranks.
    """

    def __init__(self, buffers: Sequence[Sequence[Tensor]], group: Group) -> None:
        self._buffers, self._group = buffers, group
        self._sizes = [sum(buffer.numel() for buffer in of_one) for of_one in buffers]
        self._slice = max(self._sizes)
        self._like = next(buffer for of_one in buffers for buffer in of_one)

    @property
    def is_even(self) -> bool:
        """Whether slices of one size are not much more than what is in them; the same on all ranks."""
        return self._slice <= SMALL or self._slice * self._group.size < 1.5 * sum(self._sizes)

    @property
    def _mine(self) -> Sequence[Tensor]:
        return self._buffers[self._group.rank]

    def reduce_scatter(
        self, op: ReduceOp, operation: Operation, wire: torch.dtype, take: Callable[[Tensor], None]
    ) -> PartsWork:
        """Begin to combine the parts of all ranks; `take` gets this rank's, [n], when somebody waits.

        Args:
            op: AVG or SUM.
            operation: what the ranks must agree on.
            wire: the dtype that travels.
            take: see above.
        """
        if self.is_even:
            return self._scatter_slices(op, operation, wire, take)
        parts = [self._part(owner).to(wire, copy=True) for owner in range(self._group.size)]
        works = [
            reduce(part, dst, op, self._group, async_op=self._is_async)
            for part, dst in zip(parts, self._group.ranks, strict=True)
            if part.numel()
        ]
        return self._work(works, lambda: take(parts[self._group.rank]), parts)

    def _scatter_slices(
        self, op: ReduceOp, operation: Operation, wire: torch.dtype, take: Callable[[Tensor], None]
    ) -> PartsWork:
        whole = self._as_slices()
        sent = (self._packed() if whole is None else whole).to(wire)
        mine = sent.new_empty(self._slice)
        call = Call(self._group, operation, [mine], [sent], op=op)
        work = run(REDUCE_SCATTER, call, self._is_async)
        return self._work([work], lambda: take(mine[: self._sizes[self._group.rank]]), [mine, sent])

    def all_gather(self, what: str) -> PartsWork:
        """Begin to bring to all ranks what each owns; it is there when somebody has waited.

        Args:
            what: it is; all ranks must agree on that.
        """
        if not self._slice:
            return self._work([], lambda: None, [])
        if self.is_even:
            return self._gather_slices(what)
        works, arriving = [], []
        for owner, src in enumerate(self._group.ranks):
            part = self._part(owner)
            works.append(broadcast(part, src, self._group, async_op=self._is_async) if part.numel() else None)
            arriving.append(part)
        return self._work(works, lambda: self._distribute(arriving), arriving)

    def _gather_slices(self, what: str) -> PartsWork:
        whole = self._as_slices()
        out = self._like.new_empty(self._slice * self._group.size) if whole is None else whole
        slices = cut_by(out, [self._slice] * self._group.size)
        mine = slices[self._group.rank]
        if whole is None and self._mine:
            torch._foreach_copy_(self._cut(mine, self._group.rank), list(self._mine))
        shape, dtype, device = tuple(mine.shape), dtype_name(mine.dtype), device_kind(mine)
        operation = Operation("all_gather", "", dtype, shape, extra=what, device=device)
        work = run(ALL_GATHER_INTO, Call(self._group, operation, [out], [mine]), self._is_async, out.nbytes)
        return self._work([work], partial(self._distribute, () if whole is not None else slices), [out])

    def _distribute(self, slices: Sequence[Tensor]) -> None:
        """Copy to the others' buffers what has come from them."""
        for owner, arrived in enumerate(slices):
            buffers = self._buffers[owner]
            if owner != self._group.rank and buffers and arrived.data_ptr() != buffers[0].data_ptr():
                torch._foreach_copy_(list(buffers), self._cut(arrived, owner))

    @property
    def _is_async(self) -> bool:
        """Whether the host goes on meanwhile; the same on all ranks."""
        return bool(self._group.queue.threads_allowed)

    def _work(
        self, works: Sequence[Work | None], then: Callable[[], None], memory: Sequence[Tensor]
    ) -> PartsWork:
        return PartsWork(works, then, memory, self._like, self._group)

    def _part(self, owner: int) -> Tensor:
        buffers = self._buffers[owner]
        return as_one(buffers) if buffers else self._like[:0]

    def _packed(self) -> Tensor:
        """Return slices with what all ranks own, [size * slice]; what is behind it there is anything."""
        out = self._like.new_empty(self._slice * self._group.size)
        slices = cut_by(out, [self._slice] * self._group.size)
        places = [place for owner, part in enumerate(slices) for place in self._cut(part, owner)]
        torch._foreach_copy_(places, [buffer for of_one in self._buffers for buffer in of_one])
        return out

    def _cut(self, slice_: Tensor, owner: int) -> list[Tensor]:
        """Return the memory of an owner in a slice."""
        sizes = [buffer.numel() for buffer in self._buffers[owner]]
        return cut_by(slice_[: sum(sizes)], sizes)

    def _as_slices(self) -> Tensor | None:
        """Return all buffers as one tensor, if they are slices of one size that lie side by side in order."""
        buffers = [buffer for of_one in self._buffers for buffer in of_one]
        if any(len(of_one) != 1 for of_one in self._buffers) or len(set(self._sizes)) > 1:
            return None
        first = buffers[0]
        memory = first.untyped_storage()._cdata
        if not all(_follows(a, b) and b.untyped_storage()._cdata == memory for a, b in pairwise(buffers)):
            return None
        return first.as_strided((self._slice * len(buffers),), (1,), first.storage_offset())


def _follows(first: Tensor, second: Tensor) -> bool:
    return first.storage_offset() + first.numel() == second.storage_offset()
