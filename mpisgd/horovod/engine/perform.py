"""What an operation does once every member has submitted it.

A member that has joined takes part with what changes nothing: zeros in a sum, no rows in a gathering.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device
from mpisgd.collectives.all_gather import all_gather, all_gather_into_tensor
from mpisgd.collectives.all_gather_ragged import all_gather_ragged
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.all_to_all import all_to_all_single
from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.collectives.reduce_scatter import reduce_scatter_tensor
from mpisgd.core.buffers import ALONE_BYTES, cut_by
from mpisgd.core.dtypes import ReduceOp
from mpisgd.core.group import Group
from mpisgd.horovod.engine.adasum import adasum
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.memory import Memory
from mpisgd.horovod.engine.request import Request

__all__ = ["perform", "rows_of", "scale"]

REDUCTIONS = {
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}

Step = Callable[[str], None]


def perform(
    requests: Sequence[Request],
    entries: Sequence[Entry | None],
    group: Group,
    memory: Memory,
    step: Step = lambda _: None,
) -> None:
    """Do what the members of a process set have agreed on, and complete the entries. Collective over them.

    Args:
        requests: several only for all-reductions, which then travel as one.
        entries: this rank's part in each; None where it has joined.
        group: the members.
        memory: where it is done.
        step: told what is done next, in Horovod's words.
    """
    device = memory.device_of(requests[0], entries)
    for own in filter(None, entries):
        own.begin()
    if requests[0].kind == "allreduce" and requests[0].op != "Adasum":
        results = _all_reduce(requests, entries, group, memory, step)
    else:
        step(f"MPI_{requests[0].kind.upper()}")
        results = [_ONE_BY_ONE[requests[0].kind](requests[0], entries[0], group, device)]
    for entry, result in zip(entries, results, strict=True):
        if entry is not None:
            entry.complete(result)


# --- all-reduce ---------------------------------------------------------------------------------------


def _all_reduce(
    requests: Sequence[Request],
    entries: Sequence[Entry | None],
    group: Group,
    memory: Memory,
    step: Step,
) -> list[Any]:
    step("MEMCPY_IN")
    device = memory.device_of(requests[0], entries)
    outputs = [_reduced_in(r, e, device) for r, e in zip(requests, entries, strict=True)]
    tensors = [tensor for listed in outputs for tensor in listed]
    small = [t for t in tensors if t.nbytes < ALONE_BYTES and t.dtype is tensors[0].dtype]
    packed = small if len(small) > 1 and not on_device(small[0]) else []
    flat = _pack(packed, memory, step)
    step("MPI_ALLREDUCE")
    inside = {id(tensor) for tensor in packed}
    _reduce([*flat, *(tensor for tensor in tensors if id(tensor) not in inside)], requests[0], group)
    _unpack(packed, flat, step)
    return outputs


def _reduce(tensors: Sequence[Tensor], request: Request, group: Group) -> None:
    """Combine each of `tensors`, those that are reduced in the same way as one operation."""
    alike: dict[tuple[ReduceOp, float], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(_reduction(request, tensor.dtype, group), []).append(tensor)
    for (op, factor), same in alike.items():
        if len(same) == 1:
            all_reduce(same[0], op, group)
        else:
            all_reduce_coalesced(same, op, group)
        for tensor in same:
            scale(tensor, factor)


def _reduced_in(request: Request, entry: Entry | None, device: torch.device) -> Sequence[Tensor]:
    """Return tensors that hold this rank's part and may be overwritten."""
    if entry is None:
        return _neutral(request, device)
    for output, tensor in zip(entry.outputs, entry.inputs, strict=True):
        if output is not tensor:
            output.copy_(tensor)
        scale(output, request.prescale)
    return entry.outputs


def _pack(tensors: Sequence[Tensor], memory: Memory, step: Step) -> list[Tensor]:
    """Return one tensor that holds all of `tensors`, of one dtype; none where there are none."""
    if not tensors:
        return []
    step("MEMCPY_IN_FUSION_BUFFER")
    flat = memory.room(tensors[0].dtype, sum(tensor.numel() for tensor in tensors))
    torch._foreach_copy_(_places(flat, tensors), list(tensors))
    return [flat]


def _unpack(tensors: Sequence[Tensor], flat: Sequence[Tensor], step: Step) -> None:
    if flat:
        step("MEMCPY_OUT_FUSION_BUFFER")
        torch._foreach_copy_(list(tensors), _places(flat[0], tensors))


def _places(flat: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of `flat` for each of `tensors`, of its shape."""
    pieces = cut_by(flat, [tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _reduction(request: Request, dtype: torch.dtype, group: Group) -> tuple[ReduceOp, float]:
    """Return what is reduced by, and what the result is multiplied by.

    Averages of integers are divided afterwards; those of others by who adds them up, without a pass more.
    """
    if request.op != "Average":
        return REDUCTIONS[request.op], request.postscale
    if dtype.is_floating_point or dtype.is_complex:
        return ReduceOp.AVG, request.postscale
    return ReduceOp.SUM, request.postscale / group.size


def scale(tensor: Tensor, factor: float) -> None:
    """Multiply in place; integers are multiplied in float64 and cut off toward zero, as Horovod does."""
    if factor == 1.0:
        return
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        tensor.mul_(factor)
    else:
        tensor.copy_((tensor.double() * factor).trunc_())


def _neutral(request: Request, device: torch.device) -> list[Tensor]:
    """Return what does not change a reduction."""
    tensors = []
    for tensor in _room(request, device):
        values = {"Product": 1, "Min": _limits(tensor.dtype)[1], "Max": _limits(tensor.dtype)[0]}
        tensors.append(tensor.fill_(values.get(request.op, 0)))
    return tensors


def _limits(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    if dtype is torch.bool or dtype.is_complex:
        return False, True
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _adasum(request: Request, entry: Entry | None, group: Group, device: torch.device) -> Sequence[Tensor]:
    outputs = _reduced_in(request, entry, device)
    for output in outputs:
        everyone = [torch.empty_like(output) for _ in range(group.size)]
        all_gather(everyone, output, group)
        output.copy_(adasum(everyone))
        scale(output, request.postscale)
    return outputs


# --- the others ---------------------------------------------------------------------------------------


def _all_gather(request: Request, entry: Entry | None, group: Group, device: torch.device) -> list[Tensor]:
    tensors = _no_rows(request, device) if entry is None else entry.inputs
    return [torch.cat(all_gather_ragged(tensor, group)) for tensor in tensors]


def _broadcast(request: Request, entry: Entry | None, group: Group, device: torch.device) -> Sequence[Tensor]:
    outputs = _room(request, device) if entry is None else entry.outputs
    for i, output in enumerate(outputs):
        if entry is not None and output is not entry.inputs[i] and group.ranks[group.rank] == request.root:
            output.copy_(entry.inputs[i])
        broadcast(output, request.root, group)
    return outputs


def _all_to_all(
    request: Request, entry: Entry | None, group: Group, device: torch.device
) -> tuple[Tensor, Tensor]:
    tensor = _no_rows(request, device)[0] if entry is None else entry.inputs[0]
    given = [0] * group.size if entry is None or entry.splits is None else list(entry.splits)
    everyone = torch.empty(group.size, group.size, dtype=torch.int64)
    all_gather_into_tensor(everyone, torch.tensor(given), group)
    taken = everyone[:, group.rank].tolist()
    output = tensor.new_empty(sum(taken), *tensor.shape[1:])
    all_to_all_single(output, tensor[: sum(given)], taken, given, group)
    fits = max(taken) <= torch.iinfo(torch.int32).max  # as in Horovod
    return output, torch.tensor(taken, dtype=torch.int32 if fits else torch.int64)


def _reduce_scatter(
    request: Request, entry: Entry | None, group: Group, device: torch.device
) -> list[Tensor]:
    tensors = _neutral(request, device) if entry is None else entry.inputs
    return [_own_rows(tensor, request, group) for tensor in tensors]


def _own_rows(tensor: Tensor, request: Request, group: Group) -> Tensor:
    """Reduce `tensor`, and return this rank's rows; everyone's are padded to as many as the first has."""
    starts = rows_of(tensor.shape[0], group.size)
    most = starts[1]
    padded = tensor.new_zeros(group.size, most, *tensor.shape[1:])
    for rank, place in enumerate(padded):
        rows = tensor[starts[rank] : starts[rank + 1]]
        place[: len(rows)] = rows
    scale(padded, request.prescale)
    own = tensor.new_empty(most, *tensor.shape[1:])
    op, factor = _reduction(request, tensor.dtype, group)
    reduce_scatter_tensor(own, padded, op, group)
    scale(own, factor)
    return own[: starts[group.rank + 1] - starts[group.rank]].contiguous()


def rows_of(num_rows: int, size: int) -> list[int]:
    """Return where the rows of each rank begin, and the end; the first ranks have one more if need be."""
    rows, rest = divmod(num_rows, size)
    return [rank * rows + min(rank, rest) for rank in range(size + 1)]


def _barrier(request: Request, entry: Entry | None, group: Group, device: torch.device) -> None:
    """That all members have submitted it is the barrier."""


def _room(request: Request, device: torch.device) -> list[Tensor]:
    """Return uninitialized tensors of the shapes of a request."""
    shapes = zip(request.shapes, request.dtypes, strict=True)
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in shapes]


def _no_rows(request: Request, device: torch.device) -> list[Tensor]:
    """Return tensors without rows, of which a request tells the shapes of one."""
    rows = request._replace(shapes=tuple((0, *shape) for shape in request.shapes))
    return _room(rows, device)


_ONE_BY_ONE: dict[str, Callable[[Request, Entry | None, Group, torch.device], Any]] = {
    "allreduce": _adasum,
    "allgather": _all_gather,
    "broadcast": _broadcast,
    "alltoall": _all_to_all,
    "reducescatter": _reduce_scatter,
    "barrier": _barrier,
}
