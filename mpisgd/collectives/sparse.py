"""`all_reduce_sparse`: sparse tensors travel as indices and values, never in a dense form."""

import torch
from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.collectives.all_gather import gather_rows
from mpisgd.collectives.dispatch import device_kind
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp, as_reduce_op, dtype_name
from mpisgd.errors import UnsupportedOp, UnsupportedTensor
from mpisgd.job.lifecycle import group_or_world
from mpisgd.transport.torch_reduction import divide

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(
    tensor: Tensor, op: ReduceOp | str = ReduceOp.SUM, group: Group | None = None
) -> Tensor:
    """Return the combination of everyone's sparse tensors, coalesced; the same bits on every rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: COO, of the same shape, dtype and number of sparse dimensions on every rank; unchanged.
        op: SUM or AVG.
        group: defaults to all processes of the job.

    Raises:
        UnsupportedOp, UnsupportedTensor: another `op`, or no COO tensor; before anything is sent.
        CollectiveMismatch: a rank gave another dtype, shape, `op` or number of sparse dimensions; raised on
            every rank.

    Cost: every rank sends its indices and values to all others.
    """
    op = as_reduce_op("all_reduce_sparse", op)
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedOp(f"all_reduce_sparse: op={op!r}; what a sparse tensor leaves out is 0: SUM or AVG")
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        raise UnsupportedTensor(f"all_reduce_sparse: tensor={shown(tensor)}; expected a sparse COO tensor")
    group = group_or_world(group)
    own = tensor.coalesce()  # what occurs twice here need not travel twice
    indices = gather_rows(_part_of(own, op, "indices"), own.indices().T, group)
    values = torch.cat(gather_rows(_part_of(own, op, "values"), own.values(), group))
    total = torch.sparse_coo_tensor(
        torch.cat(indices).T, values, own.shape, check_invariants=False
    ).coalesce()
    if op is ReduceOp.AVG:
        divide(total.values(), len(indices))
    return total


def _part_of(tensor: Tensor, op: ReduceOp, part: str) -> Operation:
    """Describe the exchange of one part of a sparse tensor: all but its number of entries is alike."""
    return Operation(
        "all_reduce_sparse",
        op.name,
        dtype_name(tensor.dtype),
        tuple(tensor.shape),
        extra=f"{part}, sparse_dim={tensor.sparse_dim()}",
        device=device_kind(tensor),
    )
