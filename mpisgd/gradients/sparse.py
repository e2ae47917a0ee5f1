"""Sparse gradients travel as indices and values; a dense form would be as large as the whole embedding."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mpisgd.collectives.all_gather import all_gather_into_tensor
from mpisgd.collectives.all_reduce import all_reduce
from mpisgd.collectives.sparse import all_reduce_sparse
from mpisgd.core.group import Group
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import UnsupportedTensor
from mpisgd.gradients.gradient_flags import DENSE, SPARSE, flag_of
from mpisgd.gradients.launcher import BucketLauncher

__all__ = ["SparseGradients", "empty_sparse", "reduce_sparse"]


class SparseGradients:
    """Reduces gradients that are sparse on some rank, which travel apart from the others.

    Attributes:
        dims: how many sparse dimensions they had, by parameter.
    """

    def __init__(self) -> None:
        self.dims: dict[int, int] = {}

    def reduce(
        self, planned: Sequence[int], late: Mapping[int, Tensor | None], launcher: BucketLauncher
    ) -> None:
        """Reduce what is sparse on some rank. Collective.

        Args:
            planned: the parameters whose gradients were planned as sparse.
            late: the gradients that were planned as dense, by parameter: their dense parts are reduced
                already, and only what is sparse among these is missing.
            launcher: of all parameters.
        """
        params = launcher.params
        indices = sorted({*planned, *late})
        _check_combined_as_sparse(launcher, indices)
        missing = {i: grad for i, grad in late.items() if grad is not None and grad.is_sparse}
        grads = [missing.get(i) if i in late else params[i].grad for i in indices]
        reduced = _weighted([params[i] for i in indices], grads, launcher)
        for index, total in zip(indices, reduced, strict=True):
            param = params[index]
            if total is not None and total.is_sparse:
                self.dims[index] = total.sparse_dim()
            if index in late and param.grad is not None:
                param.grad = param.grad if total is None else param.grad.add_(total)
            else:
                param.grad = total


def _check_combined_as_sparse(launcher: BucketLauncher, indices: Sequence[int]) -> None:
    """Raise UnsupportedTensor where gradients are combined in a way that takes dense ones only."""
    if launcher.options.compression.traits.replaces_op:
        names = ", ".join(launcher.named[index][0] for index in indices)
        raise UnsupportedTensor(
            f"gradients of {names} are sparse, and {launcher.options.compression} combines dense ones only; "
            "pass sparse=False to torch.nn.Embedding"
        )


def _weighted(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], launcher: BucketLauncher
) -> list[Tensor | None]:
    """Combine gradients that are sparse on some rank, those of each rank by its weight. Collective."""
    weight, op, group = launcher.weight, launcher.options.op, launcher.group
    if weight is None:
        return reduce_sparse(params, grads, op, group)
    mine = [None if grad is None else grad.clone() for grad in grads]
    for grad in mine:
        if grad is not None:
            weight.before(grad)
    reduced = reduce_sparse(params, mine, op if weight.averaged_by > 1 else ReduceOp.SUM, group)
    for total in reduced:
        if total is not None:
            weight.after(total)
    return reduced


def reduce_sparse(
    params: Sequence[Tensor], grads: Sequence[Tensor | None], op: ReduceOp, group: Group
) -> list[Tensor | None]:
    """Combine gradients that are sparse on some ranks, and maybe missing or dense on others.

    Collective: all ranks of `group` give the same parameters in the same order.

    Args:
        params: the parameters, for shapes and dtypes.
        grads: this rank's gradients of them; unchanged.
        op: SUM or AVG.

    Returns:
        For each parameter what one process would have: None where no rank has a gradient, a coalesced sparse
        tensor where all that exist are sparse, a dense one otherwise. The same bits on every rank.

    Cost: every rank sends its indices and values to all others.
    """
    own_flags = [(flag_of(grad), 0 if grad is None else grad.sparse_dim()) for grad in grads]
    mine = torch.tensor(own_flags, dtype=torch.int64)
    flags = torch.empty(group.size, *mine.shape, dtype=torch.int64)
    all_gather_into_tensor(flags, mine, group)
    return [
        _reduce_one(param, grad, flags[:, place], op, group)
        for place, (param, grad) in enumerate(zip(params, grads, strict=True))
    ]


def _reduce_one(
    param: Tensor, grad: Tensor | None, flags: Tensor, op: ReduceOp, group: Group
) -> Tensor | None:
    """Combine one of them; `flags` [size, 2] has each rank's flag and number of sparse dimensions."""
    present = set(flags[:, 0].tolist())
    total: Tensor | None = None
    if SPARSE in present:
        sparse_dim = int(flags[:, 1].max())
        own = grad if grad is not None and grad.is_sparse else empty_sparse(param, sparse_dim)
        total = all_reduce_sparse(own, op, group)
    if DENSE in present:
        own = grad.clone() if grad is not None and not grad.is_sparse else torch.zeros_like(param)
        all_reduce(own, op, group)
        total = own if total is None else own + total
    return total


def empty_sparse(param: Tensor, sparse_dim: int) -> Tensor:
    """Return a sparse tensor of the shape and dtype of `param` without values."""
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=param.device)
    values = torch.empty(0, *param.shape[sparse_dim:], dtype=param.dtype, device=param.device)
    return torch.sparse_coo_tensor(indices, values, param.shape, is_coalesced=True, check_invariants=False)
