"""`allreduce` in its forms: in place or not, waiting or not, one tensor or several, through autograd or not.

Gradient of an all-reduce: the same all-reduce of the gradients, as in Horovod.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.horovod import handles, submission
from mpisgd.horovod.arguments import as_tensor, as_tensors, check_compression
from mpisgd.horovod.compression import Compression, Compressor
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.handles import synchronize
from mpisgd.horovod.process_sets import ProcessSet, global_process_set
from mpisgd.horovod.reduce_ops import reduction_for

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
    outputs: Sequence[Tensor],
    average: bool | None,
    name: str | None,
    op: int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    *,
    grouped: bool = False,
) -> int:
    """Submit the reduction of `tensors` into `outputs`, and return its handle."""
    reduction = reduction_for(op, average, tensors[0].dtype)
    request = submission.make_request(
        "allreduce",
        name,
        tensors,
        process_set,
        in_place=outputs is tensors,
        op=reduction,
        prescale=factors[0],
        postscale=factors[1],
    )
    finish = _as_list if grouped else _only
    return submission.submit(Entry(request, tensors, outputs, finish=finish))


def _only(outputs: Sequence[Tensor]) -> Tensor:
    return outputs[0]


def _as_list(outputs: Sequence[Tensor]) -> list[Tensor]:
    return list(outputs)


def _fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.empty_like(tensor, requires_grad=False) for tensor in tensors]


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


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
        average: older spelling of op=Average or op=Sum.
        name: under which the members' calls find each other; by default the calls are counted.
        op: Average unless told otherwise. Averages of integers are cut off toward zero.
        prescale_factor: multiplied before the reduction.
        postscale_factor: multiplied after it.
        process_set: who takes part.

    Raises:
        ValueError: a name that is pending already, a process set this rank is not in.
        HorovodInternalError: from `synchronize`: the members gave different shapes, dtypes or options.
    """
    factors = (prescale_factor, postscale_factor)
    as_tensor("allreduce", tensor)
    return _start(_detached([tensor]), _fresh([tensor]), average, name, op, factors, process_set)


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
    factors, own = (prescale_factor, postscale_factor), _detached([as_tensor("allreduce", tensor)])
    handle = _start(own, own, average, name, op, factors, process_set)
    return _giving_back(handle, [tensor])


def _giving_back(handle: int, tensors: Sequence[Tensor], *, grouped: bool = False) -> int:
    """Let a handle return the tensors that the user gave, which were worked on without their history."""
    entry = handles.entry(handle)
    entry.finish = (lambda _: list(tensors)) if grouped else (lambda _: tensors[0])
    return handle


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Combine `tensor` in place, and return it; see `allreduce_async`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: Tensor = synchronize(handle)
    return result


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
    """Return the combination of everyone's `tensor`, with a gradient; see `allreduce_async`."""
    check_compression("allreduce", compression)
    smaller, ctx = compression.compress(as_tensor("allreduce", tensor))
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: Tensor = HorovodAllreduce.apply(smaller, *options)  # type: ignore[no-untyped-call]
    return compression.decompress(reduced, ctx)


class HorovodAllreduce(torch.autograd.Function):
    """`allreduce` as a function that has a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *options: Any) -> Tensor:
        """Reduce; `options` as of `allreduce_async`."""
        average, _, op, prescale, postscale, process_set = options
        ctx.options = (average, None, op, prescale, postscale, process_set)
        reduced: Tensor = synchronize(allreduce_async(tensor, *options))
        return reduced

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Reduce the gradient in the same way."""
        return synchronize(allreduce_async(grads[0], *ctx.options)), *[None] * 6


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start to combine several tensors, which run together; the handle's result is a list of new tensors."""
    given = _detached(as_tensors("allreduce", tensors))
    factors = (prescale_factor, postscale_factor)
    return _start(given, _fresh(given), average, name, op, factors, process_set, grouped=True)


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
    own, factors = _detached(as_tensors("allreduce", tensors)), (prescale_factor, postscale_factor)
    handle = _start(own, own, average, name, op, factors, process_set, grouped=True)
    return _giving_back(handle, tensors, grouped=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Combine several tensors in place, and return them; see `grouped_allreduce_async`."""
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    results: list[Tensor] = synchronize(grouped_allreduce_async_(tensors, *options))
    return results


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
    """Return the combinations of several tensors, with gradients; see `grouped_allreduce_async`."""
    check_compression("allreduce", compression)
    pairs = [compression.compress(tensor) for tensor in as_tensors("allreduce", tensors)]
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    reduced = HorovodGroupedAllreduce.apply(*options, *[tensor for tensor, _ in pairs])  # type: ignore[no-untyped-call]
    return [compression.decompress(r, ctx) for r, (_, ctx) in zip(reduced, pairs, strict=True)]


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
