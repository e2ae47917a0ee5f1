"""`broadcast` in its forms.

Gradient, as in Horovod: the average of everyone's on the root, zero elsewhere.
"""

from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.arguments import as_rank, as_tensor
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.ops import submission
from mpisgd.horovod.ops.allreduce import allreduce_async
from mpisgd.horovod.ops.handles import synchronize, synchronous
from mpisgd.horovod.ops.reduce_ops import Average
from mpisgd.horovod.process_sets import ProcessSet, global_process_set
from mpisgd.job.rank_info import rank

__all__ = ["HorovodBroadcast", "broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]


def _start(
    tensor: Tensor, output: Tensor, root_rank: int, name: str | None, process_set: ProcessSet, result: Tensor
) -> int:
    root_rank = as_rank("broadcast", root_rank)
    request = submission.make_request(
        "broadcast", name, [tensor], process_set, in_place=output is tensor, root=root_rank
    )
    if root_rank not in process_set.members():
        raise ValueError(f"broadcast received invalid root rank {root_rank} for provided process set")
    return submission.submit(Entry(request, [tensor], [output], finish=lambda _: result))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to copy the root's `tensor` to all ranks; the handle's result is a new tensor.

    Args:
        tensor: of the same shape and dtype on all members; unchanged.
        root_rank: a rank of the job, also in a smaller process set.
        name, process_set: as for `allreduce_async`.

    Raises:
        ValueError: a root outside the process set, a name that is pending.
        HorovodInternalError: from `synchronize`: the members gave different shapes, dtypes or roots.
    """
    output = torch.empty_like(as_tensor("broadcast", tensor), requires_grad=False)
    return _start(tensor.detach(), output, root_rank, name, process_set, output)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to copy the root's `tensor` into that of all ranks; see `broadcast_async`."""
    own = as_tensor("broadcast", tensor).detach()
    return _start(own, own, root_rank, name, process_set, tensor)


broadcast_ = synchronous("broadcast_", broadcast_async_)
"""Copy the root's `tensor` into that of every rank, and return it; see `broadcast_async_`."""


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the root's `tensor` on every rank; differentiable. See `broadcast_async`."""
    result: Tensor = HorovodBroadcast.apply(tensor, root_rank, name, process_set)  # type: ignore[no-untyped-call]
    return result


class HorovodBroadcast(torch.autograd.Function):
    """`broadcast` as a function that has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet
    ) -> Tensor:
        """Broadcast."""
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Average the gradients for the root."""
        averaged: Tensor = synchronize(allreduce_async(grads[0], op=Average, process_set=ctx.process_set))
        return averaged if rank() == ctx.root_rank else torch.zeros_like(averaged), None, None, None
