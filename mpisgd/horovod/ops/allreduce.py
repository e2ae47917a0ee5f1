"""`allreduce` in its forms: in place or not, waiting or not, one tensor or several, through autograd or not.

Gradient of an all-reduce: the same all-reduce of the gradients, as in Horovod.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod.arguments import as_tensor, as_tensors
from mpisgd.horovod.compression import Compression, Compressor
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.ops import submission
from mpisgd.horovod.ops.differentiable import OfOneTensor, compressed
from mpisgd.horovod.ops.handles import synchronize, synchronous
from mpisgd.horovod.ops.reduce_ops import reduction_for
from mpisgd.horovod.process_sets import ProcessSet, global_process_set

__all__ = [
    "HorovodAllreduce",
    "HorovodGroupedAllreduce",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
]


def _start(
    tensors: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    in_place: bool = False,
    grouped: bool = False,
) -> int:
    """Submit the reduction of `tensors`, and return its handle."""
    inputs = [tensor.detach() for tensor in tensors]
    outputs = inputs if in_place else [torch.empty_like(tensor) for tensor in inputs]
    request = submission.make_request(
        "allreduce",
        name,
        inputs,
        process_set,
        in_place=in_place,
        op=reduction_for(op, average, inputs[0].dtype),
        prescale=factors[0],
        postscale=factors[1],
    )
    results = list(tensors) if in_place else outputs  # in place: the user's own, with their history
    return submission.submit(
        Entry(request, inputs, outputs, finish=lambda _: results if grouped else results[0])
    )


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine `tensor` over a process set; return the handle of the result, a new tensor.

    Args:
        tensor: of the same shape and dtype on all members; leave it alone until `synchronize`.
        average: older form of op=Average or op=Sum.
        name: identifies the operation on all members; by default a running number.
        op: default Average. Averages of integers are truncated toward zero.
        prescale_factor: factor before the reduction.
        postscale_factor: factor after the reduction.
        process_set: the ranks that take part.

    Raises:
        ValueError: a name that is pending, or a process set without this rank.
        HorovodInternalError: from `synchronize`: the members gave different shapes, dtypes or options.
    """
    factors = (prescale_factor, postscale_factor)
    return _start([as_tensor("allreduce", tensor)], average, name, op, factors, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine `tensor` in place; see `allreduce_async`."""
    factors = (prescale_factor, postscale_factor)
    return _start([as_tensor("allreduce", tensor)], average, name, op, factors, process_set, in_place=True)


allreduce_ = synchronous("allreduce_", allreduce_async_)
"""Combine `tensor` in place, and return it; see `allreduce_async_`."""


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Return the combination of `tensor` of all ranks; differentiable. See `allreduce_async`."""
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    tensors = [as_tensor("allreduce", tensor)]
    return compressed(HorovodGroupedAllreduce, "allreduce", tensors, compression, options)[0]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine several tensors in one operation; the handle's result is a list of new tensors."""
    given, factors = as_tensors("allreduce", tensors), (prescale_factor, postscale_factor)
    return _start(given, average, name, op, factors, process_set, grouped=True)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine several tensors in place; see `grouped_allreduce_async`."""
    given, factors = as_tensors("allreduce", tensors), (prescale_factor, postscale_factor)
    return _start(given, average, name, op, factors, process_set, in_place=True, grouped=True)


grouped_allreduce_ = synchronous("grouped_allreduce_", grouped_allreduce_async_)
"""Combine a list of tensors in place, and return them; see `grouped_allreduce_async_`."""


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Return the combinations of several tensors; differentiable. See `grouped_allreduce_async`."""
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    given = as_tensors("allreduce", tensors)
    return compressed(HorovodGroupedAllreduce, "allreduce", given, compression, options)


class HorovodGroupedAllreduce(torch.autograd.Function):
    """`grouped_allreduce` as a function that has a gradient."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        """Reduce; six options as of `grouped_allreduce_async`, then the tensors."""
        average, _, op, prescale, postscale, process_set = arguments[:6]
        ctx.options = (average, None, op, prescale, postscale, process_set)
        return tuple(synchronize(grouped_allreduce_async(arguments[6:], *arguments[:6])))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Reduce the gradients in the same way."""
        return *[None] * 6, *synchronize(grouped_allreduce_async(grads, *ctx.options))


class HorovodAllreduce(OfOneTensor):
    """`allreduce` as a function that has a gradient."""

    grouped = HorovodGroupedAllreduce
