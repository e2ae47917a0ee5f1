"""`allgather` in its forms: everyone's rows, one after the other.

Gradient, as in Horovod: the average of everyone's gradients, of which a rank gets the rows that were its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.arguments import as_tensor, as_tensors
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.ops import submission
from mpisgd.horovod.ops.allreduce import allreduce_async
from mpisgd.horovod.ops.differentiable import OfOneTensor
from mpisgd.horovod.ops.handles import synchronize
from mpisgd.horovod.ops.reduce_ops import Average, name_of
from mpisgd.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "HorovodAllgather",
    "HorovodGroupedAllgather",
    "allgather",
    "allgather_async",
    "gather_to_reduce",
    "grouped_allgather",
    "grouped_allgather_async",
    "own_rows",
]


def allgather_async(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to gather `tensor` of all ranks; the handle's result is [rows of all ranks, ...].

    Args:
        tensor: [rows of this rank, ...]; dtype and the other dimensions are the same on all members.
        name, process_set: as for `allreduce_async`.

    Raises:
        ValueError: a tensor without dimensions, a name that is pending, or a process set without this rank.
        HorovodInternalError: from `synchronize`: the members differ in dtype or in other dimensions.
    """
    return _start([as_tensor("allgather", tensor)], name, process_set, lambda gathered: gathered[0])


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start to gather several tensors in one operation; see `allgather_async`."""
    return _start(as_tensors("allgather", tensors), name, process_set, list)


def gather_to_reduce(tensor: Tensor, name: str, op: int, process_set: ProcessSet) -> int:
    """Start to gather what every rank will combine by itself.

    For a reduction whose parts cannot be added up on their way. As in other reductions, a rank that has
    joined takes part with what changes nothing, here no rows.
    """
    return _start([tensor], name, process_set, lambda gathered: gathered[0], name_of(op))


def _start(
    tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet, finish: Any, op: str = ""
) -> int:
    inputs = [tensor.detach() for tensor in tensors]
    request = submission.make_request("allgather", name, inputs, process_set, op=op)
    return submission.submit(Entry(request, inputs, finish=finish))


def allgather(
    tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return the rows of all ranks; differentiable. See `allgather_async`."""
    return HorovodAllgather.apply(as_tensor("allgather", tensor), name, process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Tensor]:
    """Return the rows of all ranks of several tensors; differentiable. See `allgather_async`."""
    checked = as_tensors("allgather", tensors)
    return list(HorovodGroupedAllgather.apply(name, process_set, *checked))  # type: ignore[no-untyped-call]


class HorovodGroupedAllgather(torch.autograd.Function):
    """`grouped_allgather` as a function that has gradients."""

    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Gather."""
        gathered = synchronize(grouped_allgather_async(tensors, name, process_set))
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return tuple(gathered)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Average the gradients, and take the rows that the gathering has from this rank."""
        return None, None, *[own_rows(*pair, ctx.process_set) for pair in zip(grads, ctx.rows, strict=True)]


def own_rows(grad: Tensor, rows: int, process_set: ProcessSet) -> Tensor:
    """Average `grad` over the members, and return the rows that a gathering has from this one."""
    handle = allreduce_async(grad, op=Average, process_set=process_set)
    everyones = synchronize(allgather_async(torch.tensor([rows]), process_set=process_set)).tolist()
    start = sum(everyones[: process_set.rank()])
    averaged: Tensor = synchronize(handle)
    return averaged[start : start + rows]


class HorovodAllgather(OfOneTensor):
    """`allgather` as a function that has a gradient."""

    grouped = HorovodGroupedAllgather
