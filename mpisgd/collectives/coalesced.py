"""Collectives on lists of tensors: one place in the order, one agreement, and few messages."""

from collections.abc import Sequence

from torch import Tensor

from mpisgd.collectives.all_gather import ALL_GATHER_INTO, check_gathered
from mpisgd.collectives.all_reduce import ALL_REDUCE_COALESCED
from mpisgd.collectives.broadcast import BROADCAST
from mpisgd.collectives.dispatch import Call, device_kind, run
from mpisgd.collectives.reduce_scatter import REDUCE_SCATTER, check_scattered
from mpisgd.collectives.tensor_arguments import check_tensors
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.dtypes import ReduceOp, as_reduce_op, check_op, dtype_name
from mpisgd.errors import ShapeMismatch
from mpisgd.job.lifecycle import group_or_world

__all__ = [
    "all_gather_into_tensor_coalesced",
    "all_reduce_coalesced",
    "broadcast_coalesced",
    "reduce_scatter_tensor_coalesced",
]


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine each of `tensors` over the group, in place; small ones of one dtype are sent as one message.

    Collective: all ranks of `group` call it in the same order, with the same shapes and dtypes.

    Args:
        tensors: dense tensors on one device, dtypes may be mixed; overwritten. The list may be empty, on all
            ranks, as for a model without parameters.
        op: see `all_reduce`; it must be defined for every dtype.
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
    reduction = as_reduce_op(name, op)
    for tensor in checked:
        check_op(name, reduction, tensor.dtype)
    operation = _operation(name, checked, op=reduction.name)
    return run(ALL_REDUCE_COALESCED, Call(group, operation, checked, op=reduction), async_op)


def broadcast_coalesced(
    tensors: Sequence[Tensor], src: int, group: Group | None = None, async_op: bool = False
) -> Work | None:
    """Copy the tensors of rank `src` to all ranks; small ones of one dtype are sent as one message.

    Collective: all ranks of `group` call it in the same order, with the same shapes and dtypes.

    Args:
        tensors: dense tensors on one device, dtypes may be mixed; overwritten except on `src`.
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

    call = Call(group, _operation("broadcast_coalesced", checked, root=root), checked)
    return run(BROADCAST._replace(tuned=False), call, async_op)


def all_gather_into_tensor_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do `all_gather_into_tensor` for each pair of an output and an input; see there.

    The lists may be empty, on all ranks, as for a model without parameters.
    """
    group = group_or_world(group)
    name = "all_gather_into_tensor_coalesced"
    outputs, inputs = _check_pairs(name, output_tensors, input_tensors)
    for output, tensor in zip(outputs, inputs, strict=True):
        check_gathered(name, output, tensor, group.size)
    call = Call(group, _operation(name, inputs), outputs, inputs)
    return run(ALL_GATHER_INTO._replace(tuned=False), call, async_op)


def reduce_scatter_tensor_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    op: ReduceOp | str = ReduceOp.SUM,
    group: Group | None = None,
    async_op: bool = False,
) -> Work | None:
    """Do `reduce_scatter_tensor` for each pair of an output and an input; see there.

    The lists may be empty, on all ranks.
    """
    group = group_or_world(group)
    name = "reduce_scatter_tensor_coalesced"
    outputs, inputs = _check_pairs(name, output_tensors, input_tensors)
    reduction = as_reduce_op(name, op)
    for output, tensor in zip(outputs, inputs, strict=True):
        check_scattered(name, output, tensor, reduction, group.size)
    operation = _operation(name, outputs, op=reduction.name)
    return run(REDUCE_SCATTER, Call(group, operation, outputs, inputs, op=reduction), async_op)


def _check_pairs(
    name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    checked_outputs = check_tensors(name, outputs, "output_tensors", output=True)
    checked_inputs = check_tensors(name, inputs, "input_tensors")
    if len(checked_outputs) != len(checked_inputs):
        raise ShapeMismatch(
            f"{name}: {len(checked_outputs)} output_tensors for {len(checked_inputs)} input_tensors"
        )
    return checked_outputs, checked_inputs


def _operation(name: str, tensors: Sequence[Tensor], *, op: str = "", root: int = -1) -> Operation:
    signature = " ".join(f"{dtype_name(tensor.dtype)}{list(tensor.shape)}" for tensor in tensors)
    device = device_kind(tensors[0] if tensors else None)
    return Operation(name, op=op, root=root, extra=signature, device=device)
