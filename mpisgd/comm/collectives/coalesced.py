"""Collectives on lists of tensors: one place in the order, one agreement, and few messages."""

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.comm.buffers import Landing, check_tensors, cut_by, dtype_name, readable
from mpisgd.comm.collectives.all_gather import check_gathered, gather_flat
from mpisgd.comm.collectives.all_reduce import choose_algorithm, reduce_flat
from mpisgd.comm.collectives.reduce_scatter import check_scattered, cut, reduce_own
from mpisgd.comm.dtypes import ReduceOp, check_op
from mpisgd.comm.group import Group
from mpisgd.comm.handshake import Operation
from mpisgd.comm.job import group_or_world
from mpisgd.comm.work import Work
from mpisgd.errors import ShapeMismatch

__all__ = [
    "all_gather_into_tensor_coalesced",
    "all_reduce_coalesced",
    "broadcast_coalesced",
    "reduce_scatter_tensor_coalesced",
]


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine each of `tensors` over the group, in place; those of one dtype travel as one message.

    Collective: all ranks of `group` call it in the same order, with the same shapes and dtypes.

    Args:
        tensors: dense CPU tensors, dtypes may be mixed; overwritten.
        op: see `all_reduce`; every dtype must have it.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, UnsupportedOp: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: one all-reduce per dtype, and one copy of everything in and out.
    """
    group = group_or_world(group)
    name = "all_reduce_coalesced"
    checked = check_tensors(name, tensors, "tensors", output=True)
    for tensor in checked:
        op = check_op(name, op, tensor.dtype)

    def action() -> None:
        for same in _by_dtype(checked):
            _through_one(
                same, lambda flat: reduce_flat(group, flat, op, choose_algorithm(group, "auto", flat))
            )

    operation = Operation(name, op=getattr(op, "name", str(op)), extra=_signature(checked))
    return group.lane.run(operation, action, tensors=checked, async_op=async_op)


def broadcast_coalesced(
    tensors: Sequence[Tensor], src: int, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Copy each of the tensors of rank `src` into everyone's; those of one dtype travel as one message.

    Collective: all ranks of `group` call it in the same order, with the same shapes and dtypes.

    Args:
        tensors: dense CPU tensors, dtypes may be mixed; overwritten except on `src`.
        src: global rank of the one that has the values.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, InvalidRank: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: one broadcast per dtype, and one copy of everything in and out.
    """
    group = group_or_world(group)
    checked = check_tensors("broadcast_coalesced", tensors, "tensors", output=True)
    root = group.group_rank("broadcast_coalesced", "src", src)

    def action() -> None:
        for same in _by_dtype(checked):
            if group.rank == root:
                group.lane.wire.broadcast(torch.cat([readable(tensor) for tensor in same]), root)
            else:
                _through_one(same, lambda flat: group.lane.wire.broadcast(flat, root))

    operation = Operation("broadcast_coalesced", root=root, extra=_signature(checked))
    return group.lane.run(operation, action, tensors=checked, async_op=async_op)


def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do `all_gather_into_tensor` for each pair of an output and an input; see there."""
    group = group_or_world(group)
    name = "all_gather_into_tensor_coalesced"
    pairs = _pairs(name, output_tensors, input_tensors)
    for output, tensor in pairs:
        check_gathered(name, output, tensor, group.size)

    def action() -> None:
        for output, tensor in pairs:
            gather_flat(group, output, tensor)

    operation = Operation(name, extra=_signature(input_tensors))
    return group.lane.run(operation, action, tensors=list(output_tensors), async_op=async_op)


def reduce_scatter_tensor_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do `reduce_scatter_tensor` for each pair of an output and an input; see there."""
    group = group_or_world(group)
    name = "reduce_scatter_tensor_coalesced"
    pairs = _pairs(name, output_tensors, input_tensors)
    for output, tensor in pairs:
        op = check_scattered(name, output, tensor, op, group.size)

    def action() -> None:
        for output, tensor in pairs:
            reduce_own(group, output, cut(tensor, group.size), op)

    operation = Operation(name, op=getattr(op, "name", str(op)), extra=_signature(output_tensors))
    return group.lane.run(operation, action, tensors=list(output_tensors), async_op=async_op)


def _pairs(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    checked_outputs = check_tensors(name, outputs, "output_tensors", output=True)
    checked_inputs = check_tensors(name, inputs, "input_tensors")
    if len(checked_outputs) != len(checked_inputs):
        raise ShapeMismatch(f"{name}: {len(checked_outputs)} outputs for {len(checked_inputs)} inputs")
    return list(zip(checked_outputs, checked_inputs, strict=True))


def _signature(tensors: Sequence[Tensor]) -> str:
    return " ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_dtype[tensor.dtype].append(tensor)
    return list(by_dtype.values())


def _through_one(tensors: list[Tensor], communicate: Callable[[Tensor], None]) -> None:
    """Copy tensors of one dtype into one, communicate it, and copy the results back."""
    landings = [Landing(tensor, keep=True) for tensor in tensors]
    whole = torch.cat([landing.flat for landing in landings])
    communicate(whole)
    pieces = cut_by(whole, [landing.flat.numel() for landing in landings])
    for landing, piece in zip(landings, pieces, strict=True):
        landing.settle(piece)
