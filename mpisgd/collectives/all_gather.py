"""`all_gather`: everyone gets the tensors of all ranks, in a list or in one tensor, of equal sizes or not."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mpisgd.accelerator.buffers import clone_if_overlapping
from mpisgd.collectives.dispatch import (
    Call,
    Collective,
    KnownCall,
    device_backend,
    device_kind,
    known_transfer,
    operation_on,
    remember,
    run,
    run_at_once,
)
from mpisgd.collectives.packing import own_part
from mpisgd.collectives.tensor_arguments import (
    check_output,
    check_same,
    check_tensor,
    check_tensors,
    lies_in_order,
)
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import dtype_name
from mpisgd.errors import ShapeMismatch
from mpisgd.interfaces.host_transport import HostTransport, Steps
from mpisgd.job.lifecycle import group_or_world
from mpisgd.memory_ranges import equal_ranges, range_of
from mpisgd.transport.device.backend import DeviceBackend

__all__ = [
    "ALL_GATHER_INTO",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_ragged",
    "check_gathered",
    "gather_rows",
]


def all_gather(
    tensor_list: Sequence[Tensor], tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Copy the tensor of the r-th rank into `tensor_list[r]` of every rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor_list: `group.size` tensors of the dtype of `tensor`, the r-th of the size of the r-th rank's
            tensor; overwritten. Sizes may differ within the list, but all ranks must give the same list of
            sizes.
        tensor: same dtype on every rank, and the size that all lists have for this rank; unchanged.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave all tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank gave another shape or dtype; raised on every rank. Pad the last batch, or
            use drop_last=True.

    Cost: on one host, through shared memory without any scratch; else MPI_Allgather and `group.size *
        tensor.numel()` elements of scratch memory. With unequal sizes each rank sends its tensor to each
        other one; by NCCL each tensor is broadcast.
    """
    group = group_or_world(group)
    check_tensor("all_gather", tensor)
    outputs = check_tensors("all_gather", tensor_list, "tensor_list", count=group.size, output=True)
    if any(
        output.numel() != outputs[0].numel() for output in outputs
    ):  # alike on all ranks, or they disagree
        return _all_gather_uneven(outputs, tensor, group, async_op)
    for i, output in enumerate(outputs):
        check_same("all_gather", f"tensor_list[{i}]", output, tensor.numel(), tensor, "as `tensor`")
    call = Call(group, operation_on("all_gather", tensor), outputs, [tensor])
    return run(ALL_GATHER, call, async_op)


def _all_gather_uneven(outputs: list[Tensor], tensor: Tensor, group: Group, async_op: bool) -> Work | None:
    sizes = [output.numel() for output in outputs]
    for i, output in enumerate(outputs):
        check_same("all_gather", f"tensor_list[{i}]", output, sizes[i], tensor, "as `tensor`")
    own = f"tensor_list[{group.rank}]"
    check_same("all_gather", own, outputs[group.rank], tensor.numel(), tensor, "as `tensor`, of this rank")
    operation = Operation(
        "all_gather", dtype=dtype_name(tensor.dtype), shape=tuple(sizes), device=device_kind(tensor)
    )
    return run(ALL_GATHER_UNEVEN, Call(group, operation, outputs, [tensor]), async_op)


def _uneven_by_mpi(call: Call) -> None:
    (tensor,), me = call.inputs, call.group.rank
    flats = [call.write(output) for output in call.outputs]
    mine = clone_if_overlapping(call.read(tensor), flats, own=me)
    others = [rank for rank in range(call.group.size) if rank != me]
    call.link.transfer(
        sends=[(rank, mine) for rank in others], receives=[(rank, flats[rank]) for rank in others]
    )
    if flats[me].data_ptr() != mine.data_ptr():
        flats[me].copy_(mine)


def _uneven_on_device(call: Call, backend: DeviceBackend) -> Callable[[], Any]:
    """Everyone's tensor is broadcast into its place: no rank has room for all of them but there."""
    (tensor,) = call.inputs
    flats = [call.write(output) for output in call.outputs]
    mine = clone_if_overlapping(call.read(tensor), flats, own=call.group.rank)
    own = flats[call.group.rank]
    if own.data_ptr() != mine.data_ptr():
        own.copy_(mine)
    return lambda: [backend.broadcast(flat, root) for root, flat in enumerate(flats)]


def _flats_of_list(call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    (tensor,) = call.inputs
    out = call.write_as_one(call.outputs)
    yield out, clone_if_overlapping(call.read(tensor), [out])


def _list_in_steps(call: Call, transport: HostTransport) -> Steps:
    (tensor,) = call.inputs
    flats = [call.write(output) for output in call.outputs]
    mine = clone_if_overlapping(call.read(tensor), flats, own=call.group.rank)
    yield from transport.all_gather([range_of(flat) for flat in flats], range_of(mine))


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Gather `input_tensor` of all ranks in rank order into `output_tensor` of every rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        output_tensor: `group.size` times the elements of `input_tensor`, same dtype; the shape may be that of
            the concatenated or of the stacked tensors; overwritten.
        input_tensor: same shape and dtype on every rank; unchanged. It may be this rank's slice of
            `output_tensor` (then nothing is copied), or overlap it in any other way (then it is copied).
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave both tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank gave another shape or dtype; raised on every rank.

    Cost: on one host through shared memory where that is quicker (`tune`); else MPI_Allgather.
    """
    group = group_or_world(group)
    if lies_in_order(output_tensor) and lies_in_order(input_tensor):
        both = output_tensor, input_tensor
        out, mine = both
        key = ("all_gather_into_tensor", out.shape, out.dtype, mine.shape, mine.dtype)
        if (known := group.known_calls.get(key)) is None:
            check_gathered("all_gather_into_tensor", output_tensor, input_tensor, group.size)
            remember(group, key, known := _check_call(group, output_tensor, input_tensor))
        if async_op is False and not output_tensor.is_inference() and known.run_again(both):
            increment_version([output_tensor])
            return None
        if known.at_once is not None:
            outputs, inputs = [output_tensor], [input_tensor]
            return run_at_once(group, known, both, outputs=outputs, inputs=inputs, async_op=async_op)
    else:
        check_gathered("all_gather_into_tensor", output_tensor, input_tensor, group.size)
    call = Call(group, operation_on("all_gather_into_tensor", input_tensor), [output_tensor], [input_tensor])
    return run(ALL_GATHER_INTO, call, async_op, output_tensor.nbytes)


def _check_call(group: Group, output: Tensor, tensor: Tensor) -> KnownCall:
    """Return what is known of calls on tensors of the CPU that lie in order."""
    operation, nbytes = operation_on("all_gather_into_tensor", tensor), tensor.nbytes
    return known_transfer(
        group,
        ALL_GATHER_INTO,
        operation,
        output.nbytes,
        lambda transport: transport.all_gather_at_once(nbytes),
    )


def check_gathered(name: str, output: Tensor, tensor: Tensor, size: int) -> None:
    """Raise unless `output` has room for everyone's `tensor`."""
    check_tensor(name, tensor, "input_tensor")
    check_output(name, output, "output_tensor")
    check_same(
        name, "output_tensor", output, size * tensor.numel(), tensor, f"{size} ranks times input_tensor"
    )


def _flats(call: Call) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield where everyone's input goes, and this rank's, which may lie in its place there, of each pair."""
    for output, tensor in zip(call.outputs, call.inputs, strict=True):
        out = call.write(output)
        yield out, own_part(out, call.read(tensor), call.group.rank)


Flats = Callable[[Call], Iterator[tuple[Tensor, Tensor]]]


def _mpi(call: Call, flats: Flats = _flats) -> None:
    for out, mine in flats(call):
        in_place = mine.data_ptr() == out.data_ptr() + call.group.rank * mine.nbytes
        call.communicator.all_gather(out, None if in_place else mine)


def _steps(call: Call, transport: HostTransport) -> Steps:
    for out, mine in _flats(call):
        yield from transport.all_gather(equal_ranges(out, call.group.size), range_of(mine))


def _device(call: Call, backend: DeviceBackend, flats: Flats = _flats) -> Callable[[], Any]:
    pairs = list(flats(call))
    return lambda: [backend.all_gather(out, mine) for out, mine in pairs]


def all_gather_ragged(tensor: Tensor, group: Group | None = None) -> list[Tensor]:
    """Return the tensors of all ranks in rank order; only their number of rows may differ.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: [rows of this rank, ...]; the dtype and the other dimensions are alike on all ranks.
        group: defaults to all processes of the job.

    Raises:
        UnsupportedTensor, ShapeMismatch: found locally, before anything is sent.
        CollectiveMismatch: a rank gave another dtype or other trailing dimensions; raised on every rank.

    Cost: after an all-gather of one integer, goes through shared memory on one host; else sends the tensor
        (group.size - 1) times. On GPUs, by NCCL, each tensor is broadcast, and the host waits for the sizes.
    """
    group = group_or_world(group)
    check_tensor("all_gather_ragged", tensor)
    if tensor.dim() == 0:
        raise ShapeMismatch(
            "all_gather_ragged: the tensor has no dimension that could differ; use all_gather"
        )
    row_shape = tuple(tensor.shape[1:])
    operation = Operation(
        "all_gather_ragged", dtype=dtype_name(tensor.dtype), shape=row_shape, device=device_kind(tensor)
    )
    return gather_rows(operation, tensor, group)


def gather_rows(operation: Operation, tensor: Tensor, group: Group) -> list[Tensor]:
    """Return the tensors of all ranks, whose number of rows may differ, as `operation`. Collective."""
    if device_backend(group, operation, tensor) is not None:
        return _rows_on_device(operation, tensor, group)
    pieces: list[Tensor] = []  # filled when their sizes are known
    run(ALL_GATHER_RAGGED, Call(group, operation, pieces, [tensor]), async_op=False)
    return [piece.to(tensor.device) for piece in pieces]


def _rows_on_device(operation: Operation, tensor: Tensor, group: Group) -> list[Tensor]:
    """Tell the others by the host how many rows there are; they themselves stay on the device."""
    rows = torch.empty(group.size, dtype=torch.int64)
    mine = torch.tensor(tensor.shape[:1])
    group.queue.run(operation, lambda: group.queue.communicator.all_gather(rows, mine))
    pieces = _room(rows, tensor, tensor.device)
    sizes = tuple(piece.numel() for piece in pieces)
    run(ALL_GATHER_UNEVEN, Call(group, operation._replace(shape=sizes), pieces, [tensor]), async_op=False)
    return pieces


def _ragged_by_mpi(call: Call) -> None:
    (tensor,), size, me = call.inputs, call.group.size, call.group.rank
    rows = torch.empty(size, dtype=torch.int64)
    call.communicator.all_gather(rows, torch.tensor(tensor.shape[:1]))
    mine, pieces = call.read(tensor), _room(rows, tensor)
    pieces[me].view(-1).copy_(mine)
    others = [rank for rank in range(size) if rank != me]
    call.link.transfer(
        sends=[(rank, mine) for rank in others],
        receives=[(rank, pieces[rank].view(-1)) for rank in others],
    )
    call.outputs += pieces


def _ragged_in_steps(call: Call, transport: HostTransport) -> Steps:
    (tensor,), size = call.inputs, call.group.size
    rows, mine = torch.empty(size, dtype=torch.int64), torch.tensor(tensor.shape[:1])
    yield from transport.all_gather(equal_ranges(rows, size), range_of(mine))
    mine, pieces = call.read(tensor), _room(rows, tensor)
    yield from transport.all_gather([range_of(piece) for piece in pieces], range_of(mine))
    call.outputs += pieces


def _room(rows: Tensor, tensor: Tensor, device: torch.device | None = None) -> list[Tensor]:
    """Return uninitialized tensors like `tensor`, of as many rows as everyone has; by default on the host."""
    return [torch.empty((num, *tensor.shape[1:]), dtype=tensor.dtype, device=device) for num in rows.tolist()]


ALL_GATHER_INTO = Collective("all_gather", _mpi, _steps, device=_device, tuned=True)
ALL_GATHER = Collective(
    "all_gather",
    lambda call: _mpi(call, _flats_of_list),
    _list_in_steps,
    device=lambda call, backend: _device(call, backend, _flats_of_list),
)
ALL_GATHER_UNEVEN = Collective("all_gather", _uneven_by_mpi, _list_in_steps, device=_uneven_on_device)
ALL_GATHER_RAGGED = Collective("all_gather", _ragged_by_mpi, _ragged_in_steps)
