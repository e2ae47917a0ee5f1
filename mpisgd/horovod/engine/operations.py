"""What an operation does once every member has submitted it.

A member that has joined takes part in reductions with the neutral element: zeros in a sum, no rows where
everyone's rows are gathered to be reduced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.algorithms.adasum import adasum
from mpisgd.collectives.all_gather import all_gather, all_gather_into_tensor, all_gather_ragged
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.all_to_all import all_to_all_single
from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.collectives.reduce_scatter import reduce_scatter_tensor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request

__all__ = ["perform_operation", "scale"]

REDUCTIONS = {"Sum": ReduceOp.SUM, "Min": ReduceOp.MIN, "Max": ReduceOp.MAX, "Product": ReduceOp.PRODUCT}

# Memory of 32 MiB and more is mapped anew by every malloc: to pack small tensors there takes twice the time.
MESSAGE_BYTES = 16 * 2**20


def perform_operation(
    requests: Sequence[Request],
    entries: Sequence[Entry | None],
    group: Group,
    devices: dict[str, torch.device],
    step: Callable[[str], None] = lambda _: None,
) -> None:
    """Perform a negotiated operation, and complete its entries. Collective over the process set.

    Args:
        requests: several only for all-reductions, which then travel as one.
        entries: this rank's part in each; None where it has joined.
        group: of the process set.
        devices: where tensors of each type of device were last; kept from one operation to the next.
        step: called with the name of each step, as Horovod's timeline has it.
    """
    first = requests[0]
    device = _device_of(first, entries, devices)
    parts = [entry or _stand_in(request, device) for request, entry in zip(requests, entries, strict=True)]
    for part in parts:
        part.begin()
    results: list[Any]
    if first.kind == "allreduce" and first.op != "Adasum":
        step("MEMCPY_IN")
        results = [_scaled_input(part) for part in parts]
        step("MPI_ALLREDUCE")
        _reduce([tensor for outputs in results for tensor in outputs], first, group)
    else:
        step(f"MPI_{first.kind.upper()}")
        results = [_UNFUSED[first.kind](parts[0], group)]
    for part, result in zip(parts, results, strict=True):
        part.complete(result)


def _device_of(
    request: Request, entries: Sequence[Entry | None], devices: dict[str, torch.device]
) -> torch.device:
    """Return where the tensors of an operation are, or would be on a rank that has joined.

    The progress thread has a current device of its own, so the one that was used before is remembered.
    """
    for entry in entries:
        if entry is not None and entry.inputs:
            devices[request.device] = entry.inputs[0].device
            break
    return devices.get(request.device, torch.device(request.device))


def _stand_in(request: Request, device: torch.device) -> Entry:
    """Return the part of a rank that has joined: the neutral element of a reduction, or no rows."""
    rows = (0,) if request.kind == "allgather" else ()
    tensors = []
    for shape, dtype in zip(request.shapes, request.dtypes, strict=True):
        tensor = torch.empty((*rows, *shape), dtype=getattr(torch, dtype), device=device)
        lowest, highest = _limits(tensor.dtype)
        tensors.append(tensor.fill_({"Product": 1, "Min": highest, "Max": lowest}.get(request.op, 0)))
    return Entry(request._replace(prescale=1.0), tensors, tensors)


def _limits(dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype.is_floating_point:
        return -torch.inf, torch.inf
    if dtype is torch.bool or dtype.is_complex:
        return False, True
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


# --- all-reduce ---------------------------------------------------------------------------------------


def _reduce(tensors: Sequence[Tensor], request: Request, group: Group) -> None:
    """Reduce each of `tensors`; those of the same reduction and factor as one operation."""
    alike: dict[tuple[ReduceOp, float], list[Tensor]] = {}
    for tensor in tensors:
        alike.setdefault(_reduction(request, tensor.dtype, group), []).append(tensor)
    for (op, factor), same in alike.items():
        for message in _messages(same):
            if len(message) == 1:
                all_reduce(message[0], op, group)
            else:
                all_reduce_coalesced(message, op, group)
        for tensor in same:
            scale(tensor, factor)


def _messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut a list of tensors into pieces of at most MESSAGE_BYTES, or of one tensor."""
    messages: list[list[Tensor]] = []
    nbytes = 0
    for tensor in tensors:
        nbytes += tensor.nbytes
        if not messages or nbytes > MESSAGE_BYTES:
            messages.append([])
            nbytes = tensor.nbytes
        messages[-1].append(tensor)
    return messages


def _scaled_input(entry: Entry) -> Sequence[Tensor]:
    """Return tensors that hold this rank's scaled input and may be overwritten."""
    for output, tensor in zip(entry.outputs, entry.inputs, strict=True):
        if output is not tensor:
            output.copy_(tensor)
        scale(output, entry.request.prescale)
    return entry.outputs


def _reduction(request: Request, dtype: torch.dtype, group: Group) -> tuple[ReduceOp, float]:
    """Return the reduction, and the factor for its result.

    Averages of integers are divided afterwards; others during the reduction, which saves a pass.
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


def _adasum(entry: Entry, group: Group) -> Sequence[Tensor]:
    for output in _scaled_input(entry):
        everyone = [torch.empty_like(output) for _ in range(group.size)]
        all_gather(everyone, output, group)
        output.copy_(adasum(everyone))
        scale(output, entry.request.postscale)
    return entry.outputs


# --- the others ---------------------------------------------------------------------------------------


def _all_gather(entry: Entry, group: Group) -> list[Tensor]:
    return [torch.cat(all_gather_ragged(tensor, group)) for tensor in entry.inputs]


def _broadcast(entry: Entry, group: Group) -> Sequence[Tensor]:
    root = entry.request.root
    for tensor, output in zip(entry.inputs, entry.outputs, strict=True):
        if output is not tensor and group.ranks[group.rank] == root:
            output.copy_(tensor)
        broadcast(output, root, group)
    return entry.outputs


def _all_to_all(entry: Entry, group: Group) -> tuple[Tensor, Tensor]:
    tensor, given = entry.inputs[0], list(entry.splits)
    everyone = torch.empty(group.size, group.size, dtype=torch.int64)
    all_gather_into_tensor(everyone, torch.tensor(given), group)
    taken = everyone[:, group.rank].tolist()
    output = tensor.new_empty(sum(taken), *tensor.shape[1:])
    all_to_all_single(output, tensor[: sum(given)], taken, given, group)
    fits = max(taken) <= torch.iinfo(torch.int32).max  # as in Horovod
    return output, torch.tensor(taken, dtype=torch.int32 if fits else torch.int64)


def _reduce_scatter(entry: Entry, group: Group) -> list[Tensor]:
    """Return this rank's rows of the reductions; everyone's are padded to as many as the first has."""
    results = []
    for tensor in entry.inputs:
        shares = tensor.tensor_split(group.size)  # the first ones have a row more if need be
        most = len(shares[0])
        padded = tensor.new_zeros(group.size, most, *tensor.shape[1:])
        for place, rows in zip(padded, shares, strict=True):
            place[: len(rows)] = rows
        scale(padded, entry.request.prescale)
        own = tensor.new_empty(most, *tensor.shape[1:])
        op, factor = _reduction(entry.request, tensor.dtype, group)
        reduce_scatter_tensor(own, padded, op, group)
        scale(own, factor)
        results.append(own[: len(shares[group.rank])].contiguous())
    return results


def _barrier(entry: Entry, group: Group) -> None:
    """That all members have submitted it is the barrier."""


_UNFUSED: dict[str, Callable[[Entry, Group], Any]] = {
    "allreduce": _adasum,
    "allgather": _all_gather,
    "broadcast": _broadcast,
    "alltoall": _all_to_all,
    "reducescatter": _reduce_scatter,
    "barrier": _barrier,
}
