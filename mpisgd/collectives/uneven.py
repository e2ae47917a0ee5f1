"""Collectives of one's own where ranks may run out of data: those take part with what changes nothing."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mpisgd.core.group import Group
from mpisgd.core.uneven_data import UnevenData, acting
from mpisgd.dtypes import ReduceOp

__all__ = ["beside_ranks_without_data", "neutral"]


@contextlib.contextmanager
def beside_ranks_without_data(
    group: Group, name: str, tensor: Tensor | None = None, op: ReduceOp | None = None, algorithm: str = ""
) -> Iterator[None]:
    """Do a collective inside, of which ranks without data are told before it. Collective.

    In a mean a rank counts as much as it has examples, as its gradients do: a mean of losses is that of one
    process.

    Args:
        group: its ranks.
        name: of the function.
        tensor: of an all-reduce; weighted in place where a mean is taken.
        op: likewise.
        algorithm: likewise.
    """
    form = () if tensor is None or op is None else (op.name, tensor.dtype, tuple(tensor.shape), algorithm)
    data: UnevenData | None = group.queue.uneven
    if data is not None and tensor is not None and not tensor.is_cpu:
        data.intercept(f"{name} of a tensor on {tensor.device.type}")
    with acting(group, name, group.ranks, group.ordinal, *form) as told:
        if told is not None and op is ReduceOp.AVG and tensor is not None:
            assert data is not None
            tensor.mul_(told.share(data.group.rank))
        yield


def neutral(op: ReduceOp, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return the neutral element of a reduction, in this shape."""
    if op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.BOR, ReduceOp.BXOR):
        return torch.zeros(shape, dtype=dtype)
    if op is ReduceOp.PRODUCT:
        return torch.ones(shape, dtype=dtype)
    if op is ReduceOp.BAND:
        return ~torch.zeros(shape, dtype=dtype)
    if dtype is torch.bool:
        return torch.full(shape, op is ReduceOp.MIN, dtype=dtype)
    floating = dtype.is_floating_point
    limits = torch.finfo(dtype) if floating else torch.iinfo(dtype)
    highest, lowest = (float("inf"), float("-inf")) if floating else (limits.max, limits.min)
    return torch.full(shape, highest if op is ReduceOp.MIN else lowest, dtype=dtype)
