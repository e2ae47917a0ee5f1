"""What an operation does once every member has submitted it.

A member that has joined takes part in reductions with the neutral element: zeros in a sum, no rows where
everyone's rows are gathered to be reduced.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather, all_gather_into_tensor, all_gather_ragged
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.all_to_all import all_to_all_single
from mpisgd.collectives.broadcast import broadcast
from mpisgd.collectives.coalesced import all_reduce_coalesced
from mpisgd.collectives.reduce_scatter import reduce_scatter_tensor
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.horovod.engine.adasum import adasum
from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request

__all__ = ["perform_operation", "scale"]

REDUCTIONS = {
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}

# Memory of 32 MiB and more is mapped anew by every malloc: to pack small tensors there takes twice the time.
MESSAGE_BYTES = 16 * 2**20

Step = Callable[[str], None]


def perform_operation(
    requests: Sequence[Request],
    entries: Sequence[Entry | None],
    group: Group,
    devices: dict[str, torch.device],
    step: Step = lambda _: None,
) -> None:
    """Perform a negotiated operation, and complete its entries. Collective over the process set.

    Args:
        requests: several only for all-reductions, which then travel as one.
        entries: this rank's part in each; None where it has joined.
        group: of the process set.
        devices: where tensors of each type of device were last; kept from one operation to the next.
        step: called with the name of each step, as Horovod's timeline has it.
    """
    device = _device_of(requests[0], entries, devices)
    for own in filter(None, entries):
        own.begin()
    if requests[0].kind == "allreduce" and requests[0].op != "Adasum":
        results = _all_reduce(requests, entries, group, device, step)
    else:
        step(f"MPI_{requests[0].kind.upper()}")
        results = [_UNFUSED[requests[0].kind](requests[0], entries[0], group, device)]
    for entry, result in zip(entries, results, strict=True):
        if entry is not None:
            entry.complete(result)


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


# --- all-reduce ---------------------------------------------------------------------------------------


def _all_reduce(
    requests: Sequence[Request],
    entries: Sequence[Entry | None],
    group: Group,
    device: torch.device,
    step: Step,
) -> list[Any]:
    step("MEMCPY_IN")
    outputs = [_scaled_input(r, e, device) for r, e in zip(requests, entries, strict=True)]
    step("MPI_ALLREDUCE")
    _reduce([tensor for listed in outputs for tensor in listed], requests[0], group)
    return outputs


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


def _scaled_input(request: Request, entry: Entry | None, device: torch.device) -> Sequence[Tensor]:
    """Return tensors that hold this rank's scaled input and may be overwritten."""
    if entry is None:
        return _neutral(request, device)
    for output, tensor in zip(entry.outputs, entry.inputs, strict=True):
        if output is not tensor:
            output.copy_(tensor)
        scale(output, request.prescale)
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


def _neutral(request: Request, device: torch.device) -> list[Tensor]:
    """Return the neutral element of a reduction."""
    tensors = []
    for tensor in _uninitialized(request, device):
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
    outputs = _scaled_input(request, entry, device)
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
    assert entry is not None
    for tensor, output in zip(entry.inputs, entry.outputs, strict=True):
        if output is not tensor and group.ranks[group.rank] == request.root:
            output.copy_(tensor)
        broadcast(output, request.root, group)
    return entry.outputs


def _all_to_all(
    request: Request, entry: Entry | None, group: Group, device: torch.device
) -> tuple[Tensor, Tensor]:
    assert entry is not None
    assert entry.splits is not None
    tensor, given = entry.inputs[0], list(entry.splits)
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
    assert entry is not None
    return [_own_rows(tensor, request, group) for tensor in entry.inputs]


def _own_rows(tensor: Tensor, request: Request, group: Group) -> Tensor:
    """Reduce `tensor`, and return this rank's rows; everyone's are padded to as many as the first has."""
    shares = tensor.tensor_split(group.size)  # the first ones have a row more if need be
    most = len(shares[0])
    padded = tensor.new_zeros(group.size, most, *tensor.shape[1:])
    for place, rows in zip(padded, shares, strict=True):
        place[: len(rows)] = rows
    scale(padded, request.prescale)
    own = tensor.new_empty(most, *tensor.shape[1:])
    op, factor = _reduction(request, tensor.dtype, group)
    reduce_scatter_tensor(own, padded, op, group)
    scale(own, factor)
    return own[: len(shares[group.rank])].contiguous()


def _barrier(request: Request, entry: Entry | None, group: Group, device: torch.device) -> None:
    """That all members have submitted it is the barrier."""


def _uninitialized(request: Request, device: torch.device) -> list[Tensor]:
    """Return uninitialized tensors of the shapes of a request."""
    shapes = zip(request.shapes, request.dtypes, strict=True)
    return [torch.empty(shape, dtype=getattr(torch, dtype), device=device) for shape, dtype in shapes]


def _no_rows(request: Request, device: torch.device) -> list[Tensor]:
    """Return tensors without rows, of which a request tells the shapes of one."""
    rows = request._replace(shapes=tuple((0, *shape) for shape in request.shapes))
    return _uninitialized(rows, device)


_UNFUSED: dict[str, Callable[[Request, Entry | None, Group, torch.device], Any]] = {
    "allreduce": _adasum,
    "allgather": _all_gather,
    "broadcast": _broadcast,
    "alltoall": _all_to_all,
    "reducescatter": _reduce_scatter,
    "barrier": _barrier,
}
