"""`all_reduce_sparse`: sparse tensors travel as indices and values, never in a dense form."""

import torch
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather_ragged
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import UnsupportedOp
from mpisgd.transport.torch_reduction import divide

__all__ = ["all_reduce_sparse"]


def all_reduce_sparse(tensor: Tensor, op: ReduceOp = ReduceOp.SUM, group: Group | None = None) -> Tensor:
    """Return the combination of everyone's sparse tensors, coalesced; the same bits on every rank.

    Collective: all ranks of `group` call it in the same order.

    Args:
        tensor: COO, of the same shape, dtype and number of sparse dimensions on every rank; unchanged.
        op: SUM or AVG.
        group: defaults to all processes of the job.

    Raises:
        UnsupportedOp: another `op`; before anything is sent.
        CollectiveMismatch: a rank gave another dtype or shape; raised on every rank.

    Cost: every rank sends its indices and values to all others.
    """
    if op not in (ReduceOp.SUM, ReduceOp.AVG):
        raise UnsupportedOp(f"all_reduce_sparse: op={op!r}; what a sparse tensor leaves out is 0: SUM or AVG")
    own = tensor.coalesce()  # what occurs twice here need not travel twice
    indices = all_gather_ragged(own.indices().T, group)
    values = torch.cat(all_gather_ragged(own.values(), group))
    total = torch.sparse_coo_tensor(
        torch.cat(indices).T, values, own.shape, check_invariants=False
    ).coalesce()
    if op is ReduceOp.AVG:
        divide(total.values(), len(indices))
    return total
