"""`reducescatter` in its forms: the combination of everyone's tensors, of which each rank gets some rows.

Gradient, as in Horovod: everyone's gradients, one after the other; times the number of members for a sum.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.arguments import as_tensor, as_tensors
from mpisgd.horovod.compression import Compression, Compressor
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.horovod.ops import submission
from mpisgd.horovod.ops.allgather import allgather_async
from mpisgd.horovod.ops.differentiable import OfOneTensor, compressed
from mpisgd.horovod.ops.handles import synchronize
from mpisgd.horovod.ops.reduce_ops import Average, Sum, name_of, reduction_for
from mpisgd.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "HorovodGroupedReducescatter",
    "HorovodReducescatter",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "reducescatter",
    "reducescatter_async",
]


def _start(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    process_set: ProcessSet,
    factors: tuple[float, float],
    finish: Any,
) -> int:
    if name_of(op) not in ("Average", "Sum"):
        raise HorovodInternalError("Reducescatter currently only supports AVERAGE and SUM.")
    inputs = [tensor.detach() for tensor in tensors]
    request = submission.make_request(
        "reducescatter",
        name,
        inputs,
        process_set,
        op=reduction_for(op, None, inputs[0].dtype),
        prescale=factors[0],
        postscale=factors[1],
    )
    return submission.submit(Entry(request, inputs, finish=finish))


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to combine `tensor` over the members; the handle's result is this rank's rows.

    Args:
        tensor: [rows, ...], of the same shape and dtype on all members. If the rows do not divide evenly, the
            first ranks get one more.
        op: Average or Sum.
        name, process_set, prescale_factor, postscale_factor: as for `allreduce_async`.

    Raises:
        ValueError: a tensor without dimensions, a name that is pending, or a process set without this rank.
        HorovodInternalError: another op; from `synchronize`: the members gave different shapes or options.
    """
    factors = (prescale_factor, postscale_factor)
    return _start([as_tensor("reducescatter", tensor)], name, op, process_set, factors, lambda rows: rows[0])


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start to reduce and scatter several tensors in one operation; see `reducescatter_async`."""
    factors = (prescale_factor, postscale_factor)
    return _start(as_tensors("reducescatter", tensors), name, op, process_set, factors, list)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Return this rank's rows of the combination; differentiable. See `reducescatter_async`."""
    options = (name, op, process_set, prescale_factor, postscale_factor)
    tensors = [as_tensor("reducescatter", tensor)]
    return compressed(HorovodGroupedReducescatter, "reducescatter", tensors, compression, options)[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Return this rank's rows of several combinations; differentiable. See `reducescatter_async`."""
    options = (name, op, process_set, prescale_factor, postscale_factor)
    given = as_tensors("reducescatter", tensors)
    return compressed(HorovodGroupedReducescatter, "reducescatter", given, compression, options)


class HorovodGroupedReducescatter(torch.autograd.Function):
    """`grouped_reducescatter` as a function that has gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        """Reduce and scatter; five options as of `reducescatter_async`, then the tensors."""
        ctx.options = arguments[1:5]
        return tuple(synchronize(grouped_reducescatter_async(arguments[5:], *arguments[:5])))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Gather everyone's gradients, and scale them as the reductions were."""
        op, process_set, prescale, postscale = ctx.options
        factor = prescale * postscale * (process_set.size() if op == Sum else 1)
        handles = [allgather_async(grad, process_set=process_set) for grad in grads]
        return *[None] * 5, *[synchronize(handle).mul_(factor) for handle in handles]


class HorovodReducescatter(OfOneTensor):
    """`reducescatter` as a function that has a gradient."""

    grouped = HorovodGroupedReducescatter
