"""`alltoall`: every rank has rows for every rank. Gradient: what was received goes back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.horovod.arguments import as_tensor
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.ops import submission
from mpisgd.horovod.ops.handles import synchronize
from mpisgd.horovod.process_sets import ProcessSet, global_process_set

__all__ = ["HorovodAlltoall", "alltoall", "alltoall_async"]

Splits = Tensor | Sequence[int] | None


def alltoall_async(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to send rows of `tensor` to every member.

    Args:
        tensor: [rows, ...]; dtype and the other dimensions are the same on all members.
        splits: number of rows for each member, in rank order; by default equal parts.
        name, process_set: as for `allreduce_async`.

    Returns:
        A handle. Its result is the received rows in rank order; with `splits`, a pair of these and the
        numbers of received rows.

    Raises:
        ValueError: invalid splits; before anything is sent.
        HorovodInternalError: from `synchronize`: the members differ in dtype or in other dimensions.
    """
    return _start(tensor, splits, name, process_set, with_counts=splits is not None)


def _start(
    tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet, *, with_counts: bool
) -> int:
    own = as_tensor("alltoall", tensor).detach()
    request = submission.make_request("alltoall", name, [own], process_set)
    rows = _rows_for(own, splits, process_set.size())
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")

    def finish(result: tuple[Tensor, Tensor]) -> Any:
        received, counts = result
        return (received, counts.to(device)) if with_counts else received

    return submission.submit(Entry(request, [own], splits=rows, finish=finish))


def _rows_for(tensor: Tensor, splits: Splits, size: int) -> list[int]:
    """Return how many rows each member gets."""
    if splits is None:
        if tensor.shape[0] % size:
            raise ValueError(
                "splits not provided, but first dimension of tensor is not an even multiple of the number of "
                f"workers: {tensor.shape[0]} rows, {size} ranks"
            )
        return [tensor.shape[0] // size] * size
    counts = splits if isinstance(splits, Tensor) else _as_counts(splits)
    if counts.dim() != 1:
        raise ValueError("alltoall expects a 1D splits tensor")
    if counts.dtype not in (torch.int32, torch.int64) or counts.layout is not torch.strided or counts.is_meta:
        raise ValueError("alltoall expects splits to contain 32-bit integer elements.")
    rows = [int(count) for count in counts]
    if len(rows) != size:
        raise ValueError(f"Number of entries in splits does not equal number of workers: {len(rows)}, {size}")
    if min(rows) < 0 or sum(rows) > tensor.shape[0]:
        raise ValueError(
            f"Sum of splits entries is greater than the first dimension of tensor: {rows}, {tensor.shape[0]}"
        )
    return rows


def _as_counts(splits: object) -> Tensor:
    listed = isinstance(splits, Sequence) and not isinstance(splits, str | bytes)
    if not listed or not all(isinstance(count, int) for count in splits):  # type: ignore[attr-defined]
        raise ValueError(f"alltoall: splits={shown(splits)}; expected one count of rows per rank")
    return torch.tensor(splits, dtype=torch.int64)


def alltoall(
    tensor: Tensor,
    splits: Splits = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the rows that all members send to this one; differentiable. See `alltoall_async`.

    Returns:
        The rows; with `splits`, a pair of the rows and the number of rows received from each member.
    """
    received, counts = HorovodAlltoall.apply(tensor, splits, name, process_set)  # type: ignore[no-untyped-call]
    return received if splits is None else (received, counts)


class HorovodAlltoall(torch.autograd.Function):
    """`alltoall` as a function that has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        """Exchange rows; the second result is how many came from each member."""
        received, counts = synchronize(_start(tensor, splits, name, process_set, with_counts=True))
        ctx.counts, ctx.process_set, ctx.shape = counts, process_set, tensor.shape
        ctx.mark_non_differentiable(counts)
        return received, counts

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Send the rows' gradients back; rows that went nowhere have none."""
        back, _ = synchronize(alltoall_async(grads[0], ctx.counts, process_set=ctx.process_set))
        missing = ctx.shape[0] - back.shape[0]
        if missing:
            back = torch.cat([back, back.new_zeros(missing, *ctx.shape[1:])])
        return back, None, None, None
