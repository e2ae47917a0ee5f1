"""Rows of tensors between one rank, which has all of them, and the ranks that work on them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.all_to_all import all_to_all_single
from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.coalesced import broadcast_coalesced
from mpisgd.collectives.objects import all_gather_object
from mpisgd.collectives.reduce import reduce
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp

__all__ = ["RowExchange", "gather_outcomes", "split_rows"]


def gather_outcomes(group: Group, outcome: Any, problem: Exception | None) -> list[Any]:
    """Return the outcomes of all ranks, on every rank. Collective.

    Args:
        group: the ranks.
        outcome: of this one, to be pickled.
        problem: what it has raised instead.

    Raises:
        Exception: what a rank has raised, of its type and with its traceback in the text; on every rank.
    """
    if problem is not None:
        where = f"on rank {group.ranks[group.rank]}"
        raised = (type(problem), problem, problem.__traceback__)
        outcome = ExceptionWrapper(raised, where)  # type: ignore[no-untyped-call]
    everyone: list[Any] = [None] * group.size
    all_gather_object(everyone, outcome, group)
    if problem is not None:
        raise problem
    for theirs in everyone:
        if isinstance(theirs, ExceptionWrapper):
            theirs.reraise()  # type: ignore[no-untyped-call]
    return everyone


BUCKET_CAP_BYTES = 25 * 2**20


def split_rows(num_rows: int, size: int, root: int) -> list[int]:
    """Return how many rows each rank works on: consecutive ones in rank order, as equally many as can be.

    Of unequal shares the larger ones are those of the root and of the ranks after it, so that the root has
    a row where there is one.
    """
    share, extra = divmod(num_rows, size)
    return [share + ((rank - root) % size < extra) for rank in range(size)]


@dataclass(frozen=True)
class RowExchange:
    """The ways between the root and all ranks of a group. Every method is collective.

    Attributes:
        group: the ranks.
        root: the one that has everything, by its rank in the group.
        dim: the dimension that counts rows.
    """

    group: Group
    root: int
    dim: int

    @property
    def is_root(self) -> bool:
        """Whether this rank has everything."""
        return self.group.rank == self.root

    @property
    def src(self) -> int:
        """The global rank of the root."""
        return self.group.ranks[self.root]

    def scatter(self, whole: Tensor | None, like: Tensor, counts: Sequence[int]) -> Tensor:
        """Return this rank's rows of the root's tensor.

        Args:
            whole: on the root, the tensor; unchanged.
            like: of the dtype, on the device, and of the shape of `whole` in all dimensions but `dim`.
            counts: rows of each rank.
        """
        mine = self._rows(like, counts[self.group.rank])
        source = self._rows(like, 0) if whole is None else whole.detach().movedim(self.dim, 0).contiguous()
        gives = list(counts) if self.is_root else [0] * self.group.size
        takes = [counts[self.group.rank] if rank == self.root else 0 for rank in range(self.group.size)]
        all_to_all_single(mine, source, takes, gives, self.group)
        return mine.movedim(0, self.dim)

    def gather(self, part: Tensor | None, like: Tensor, counts: Sequence[int]) -> Tensor | None:
        """Return all ranks' rows, in rank order, on the root; None elsewhere.

        Args:
            part: this rank's rows, `counts[group.rank]` of them, unchanged; None: zeros.
            like, counts: as for `scatter`.
        """
        mine = self._rows(like, counts[self.group.rank]).zero_() if part is None else part.detach()
        mine = mine if part is None else mine.movedim(self.dim, 0).contiguous()
        takes = list(counts) if self.is_root else [0] * self.group.size
        gives = [counts[self.group.rank] if rank == self.root else 0 for rank in range(self.group.size)]
        whole = self._rows(like, sum(takes))
        all_to_all_single(whole, mine, takes, gives, self.group)
        return whole.movedim(0, self.dim) if self.is_root else None

    def copy(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite all ranks' tensors by those of the root.

        Not a change for autograd, which has saved these values for the backward of an earlier call: they are
        the same ones, unless the root has changed them, and then it raises there.
        """
        if tensors:
            broadcast_coalesced([tensor.data for tensor in tensors], self.src, self.group)

    def copy_one(self, tensor: Tensor) -> None:
        """Overwrite all ranks' tensor by that of the root."""
        broadcast(tensor, self.src, self.group)

    def add_up(self, grads: Sequence[Tensor | None], likes: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the sums of all ranks' gradients on the root; Nones elsewhere, and where no rank has one.

        Args:
            grads: this rank's; a missing one counts as zero. Sparse ones become dense.
            likes: of their shapes and dtypes.
        """
        present = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8)
        all_reduce(present, ReduceOp.MAX, self.group)
        sums: list[Tensor | None] = [None] * len(grads)
        wanted = [place for place, is_there in enumerate(present.tolist()) if is_there]
        for bucket in _buckets(wanted, likes):
            flat = torch.cat([_dense(grads[place], likes[place]).reshape(-1) for place in bucket])
            reduce(flat, self.src, ReduceOp.SUM, self.group)
            if self.is_root:
                pieces = torch.split(flat, [likes[place].numel() for place in bucket])
                for place, piece in zip(bucket, pieces, strict=True):
                    sums[place] = piece.view(likes[place].shape)
        return sums

    def _rows(self, like: Tensor, count: int) -> Tensor:
        """Return `count` rows without values, along dimension 0."""
        rest = list(like.shape)
        del rest[self.dim]
        return torch.empty(count, *rest, dtype=like.dtype, device=like.device)


def _dense(grad: Tensor | None, like: Tensor) -> Tensor:
    if grad is None:
        return torch.zeros_like(like)
    return grad if grad.layout is torch.strided else grad.to_dense()


def _buckets(places: Sequence[int], likes: Sequence[Tensor]) -> Iterator[list[int]]:
    """Group consecutive tensors of one dtype to at most BUCKET_CAP_BYTES; a larger one is alone."""
    bucket: list[int] = []
    nbytes = 0
    for place in places:
        like = likes[place]
        if bucket and (like.dtype != likes[bucket[0]].dtype or nbytes + like.nbytes > BUCKET_CAP_BYTES):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(place)
        nbytes += like.nbytes
    if bucket:
        yield bucket
