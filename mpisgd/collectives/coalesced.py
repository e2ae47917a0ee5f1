"""Collectives on lists of tensors: one place in the order, one agreement, and few messages."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES, StagedOutput, as_one, cut_by, readable
from mpisgd.collectives.all_gather import check_gathered, gather_flat, gather_on_node
from mpisgd.collectives.all_reduce import choose_algorithm, reduce_flat
from mpisgd.collectives.common import device_word, direct_of, run, run_in_steps
from mpisgd.collectives.dispatch import shm_transport
from mpisgd.collectives.reduce_scatter import check_scattered, cut, own_part_on_node, reduce_own
from mpisgd.collectives.tensor_arguments import check_tensors
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, check_op, dtype_name
from mpisgd.errors import ShapeMismatch
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.shm import data_movement
from mpisgd.transport.shm.staging import range_of
from mpisgd.transport.shm.transport import ShmTransport

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
    """Combine each of `tensors` over the group, in place; small ones of one dtype travel as one message.

    Collective: all ranks of `group` call it in the same order, with the same shapes and dtypes.

    Args:
        tensors: dense tensors of one device, dtypes may be mixed; overwritten. None at all on any rank, as of
            a model without parameters, is nothing to send.
        op: see `all_reduce`; every dtype must have it.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, UnsupportedOp: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: one all-reduce per large tensor, and one per dtype of small ones, which are copied in and out.
    """
    group = group_or_world(group)
    name = "all_reduce_coalesced"
    checked = check_tensors(name, tensors, "tensors", output=True)
    for tensor in checked:
        op = check_op(name, op, tensor.dtype)

    def action() -> None:
        for same in _messages(checked):
            _through_one(
                same, lambda flat: reduce_flat(group, flat, op, choose_algorithm(group, "auto", flat))
            )

    operation = _operation(name, checked, op=getattr(op, "name", str(op)))
    if checked and (direct := direct_of(group, operation, checked[0], op=op, dtypes=_dtypes(checked))):
        return direct.all_reduce_coalesced(operation, _messages(checked), op, async_op)
    return run(group, operation, action, tensors=checked, async_op=async_op, like=_first(checked))


def broadcast_coalesced(
    tensors: Sequence[Tensor], src: int, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Copy each of the tensors of rank `src` into everyone's; small ones of one dtype travel as one message.

    Collective: all ranks of `group` call it in the same order, with the same shapes and dtypes.

    Args:
        tensors: dense tensors of one device, dtypes may be mixed; overwritten except on `src`.
        src: global rank of the one that has the values.
        group: defaults to all processes of the job.
        async_op: return at once with a `Work`; leave the tensors alone until its `wait()`.

    Raises:
        UnsupportedTensor, InvalidRank: found locally, before anything is sent.
        CollectiveMismatch: a rank called something else; raised on every rank.

    Cost: on one host, through shared memory as if they were one tensor; else one broadcast per large tensor,
        and one per dtype of small ones, which are copied in and out.
    """
    group = group_or_world(group)
    checked = check_tensors("broadcast_coalesced", tensors, "tensors", output=True)
    root = group.group_rank("broadcast_coalesced", "src", src)

    def action() -> None:
        for same in _messages(checked):
            if group.rank == root:
                group.queue.wire.broadcast(as_one([readable(tensor) for tensor in same]), root)
            else:
                _through_one(same, lambda flat: group.queue.wire.broadcast(flat, root))

    operation = _operation("broadcast_coalesced", checked, root=root)
    if checked and (direct := direct_of(group, operation, checked[0])) is not None:
        return direct.broadcast_coalesced(operation, _messages(checked), root, async_op)
    if (plane := shm_transport(group, "coalesced")) is not None:
        steps = _broadcast_on_node(plane, checked, root)
        return run_in_steps(group, plane, operation, steps, tensors=checked, async_op=async_op)
    return run(group, operation, action, tensors=checked, async_op=async_op, like=_first(checked))


def _broadcast_on_node(plane: ShmTransport, tensors: Sequence[Tensor], root: int) -> Iterator[None]:
    if plane.rank == root:
        sources = [readable(tensor) for tensor in tensors]
        yield from data_movement.broadcast(plane, [range_of(source) for source in sources], root)
        return
    landings = [StagedOutput(tensor, keep=False) for tensor in tensors]
    yield from data_movement.broadcast(plane, [range_of(landing.flat) for landing in landings], root)
    for landing in landings:
        landing.settle()


def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do `all_gather_into_tensor` for each pair of an output and an input; see there.

    No pairs at all, as of a model without parameters, are nothing to send; all ranks must have none.
    """
    group = group_or_world(group)
    name = "all_gather_into_tensor_coalesced"
    pairs = _pairs(name, output_tensors, input_tensors)
    for output, tensor in pairs:
        check_gathered(name, output, tensor, group.size)

    def action() -> None:
        for output, tensor in pairs:
            gather_flat(group, output, tensor)

    outputs = [output for output, _ in pairs]
    operation = _operation(name, [tensor for _, tensor in pairs])
    if pairs and (direct := direct_of(group, operation, outputs[0])) is not None:
        return direct.all_gather_into(operation, pairs, async_op)
    if (plane := shm_transport(group, "coalesced")) is not None:
        steps = _one_by_one([gather_on_node(plane, output, tensor) for output, tensor in pairs])
        return run_in_steps(group, plane, operation, steps, tensors=outputs, async_op=async_op)
    return run(group, operation, action, tensors=outputs, async_op=async_op, like=_first(outputs))


def reduce_scatter_tensor_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do `reduce_scatter_tensor` for each pair of an output and an input; see there.

    No pairs at all are nothing to send; all ranks must have none.
    """
    group = group_or_world(group)
    name = "reduce_scatter_tensor_coalesced"
    pairs = _pairs(name, output_tensors, input_tensors)
    for output, tensor in pairs:
        op = check_scattered(name, output, tensor, op, group.size)

    def action() -> None:
        for output, tensor in pairs:
            reduce_own(group, output, cut(tensor, group.size), op)

    outputs = [output for output, _ in pairs]
    operation = _operation(name, outputs, op=getattr(op, "name", str(op)))
    if pairs and (direct := direct_of(group, operation, outputs[0], op=op, dtypes=_dtypes(outputs))):
        return direct.reduce_scatter_from(operation, pairs, op, async_op)
    if (plane := shm_transport(group, "coalesced")) is not None:
        steps = _one_by_one([own_part_on_node(plane, output, tensor, op) for output, tensor in pairs])
        return run_in_steps(group, plane, operation, steps, tensors=outputs, async_op=async_op)
    return run(group, operation, action, tensors=outputs, async_op=async_op, like=_first(outputs))


def _one_by_one(operations: Sequence[Iterator[None]]) -> Iterator[None]:
    """Do operations on the node plane in turn; see `run_in_steps`."""
    if not operations:
        yield
    for steps in operations:
        yield from steps


def _pairs(name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    checked_outputs = check_tensors(name, outputs, "output_tensors", output=True)
    checked_inputs = check_tensors(name, inputs, "input_tensors")
    if len(checked_outputs) != len(checked_inputs):
        raise ShapeMismatch(
            f"{name}: {len(checked_outputs)} output_tensors for {len(checked_inputs)} input_tensors"
        )
    return list(zip(checked_outputs, checked_inputs, strict=True))


def _operation(name: str, tensors: Sequence[Tensor], *, op: str = "", root: int = -1) -> Operation:
    return Operation(name, op=op, root=root, extra=_signature(tensors), device=device_word(_first(tensors)))


def _first(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor that stands for all: they are on one device."""
    return tensors[0] if tensors else None


def _dtypes(tensors: Sequence[Tensor]) -> list[torch.dtype]:
    return [tensor.dtype for tensor in tensors]


def _signature(tensors: Sequence[Tensor]) -> str:
    return " ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)


def _messages(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Cut into what travels as one: a large tensor by itself, the small ones of each dtype together."""
    messages: list[list[Tensor]] = []
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= ALONE_BYTES:
            messages.append([tensor])
        elif tensor.dtype in small:
            small[tensor.dtype].append(tensor)
        else:
            messages.append(small.setdefault(tensor.dtype, [tensor]))
    return messages


def _through_one(tensors: Sequence[Tensor], communicate: Callable[[Tensor], None]) -> None:
    """Communicate tensors of one dtype as one: copied together and back if there are several."""
    landings = [StagedOutput(tensor, keep=True) for tensor in tensors]
    whole = as_one([landing.flat for landing in landings])
    communicate(whole)
    pieces = cut_by(whole, [landing.flat.numel() for landing in landings])
    for landing, piece in zip(landings, pieces, strict=True):
        landing.settle(piece)
