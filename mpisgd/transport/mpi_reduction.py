"""`for_mpi`: the form in which MPI reduces a tensor as torch would.

MPI has its own element types, and some of its reductions are wrong or differ from torch's: those travel as
another type, in which they are right.
"""

import torch
from torch import Tensor

from mpisgd.dtypes import BITWISE, BOOL_OPS, ORDERED, SUMMED_IN_FLOAT32, UNSIGNED_AS_SIGNED, ReduceOp
from mpisgd.transport.torch_reduction import NARROW, Finish, as_bool, as_signed, finish_average

__all__ = ["for_mpi"]

# Integers of the same width, whose order floating numbers can be given.
ORDER_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}


def for_mpi(flat: Tensor, op: ReduceOp, size: int) -> tuple[Tensor, str, Finish]:
    """Return (`flat` in a form MPI adds, MPI's operation, what makes the result of it).

    The first may share memory with `flat`.
    """
    if flat.dtype is torch.bool:
        return flat.view(torch.uint8), BOOL_OPS.get(op, op).name, as_bool
    added = ReduceOp.SUM if op is ReduceOp.AVG else op
    if flat.dtype in NARROW and op not in BITWISE:
        return flat.to(torch.int32), added.name, finish_average(op, size, flat.dtype)
    if flat.dtype in UNSIGNED_AS_SIGNED and op in ORDERED:  # wrong in Open MPI 4.1 (its issue 10648)
        work, _, finish = as_signed(flat, op)
        return work, op.name, finish
    work = flat.float() if flat.dtype in SUMMED_IN_FLOAT32 else flat
    if op in ORDERED and work.dtype in ORDER_KEYS:
        return _order_keys(work, op), op.name, lambda keys: _from_order_keys(keys, work.dtype).to(flat.dtype)
    return work, added.name, finish_average(op, size, flat.dtype)


def _order_keys(work: Tensor, op: ReduceOp) -> Tensor:
    """Return integers ordered as the floating numbers are, with NaN beyond all of them.

    MPI compares with `a > b ? a : b`: whether NaN wins then depends on the rank that holds it, and ranks may
    even end with different results. As integers NaN always wins, as in torch, and -0 is less than +0.
    """
    kind = ORDER_KEYS[work.dtype]
    limits, keys = torch.iinfo(kind), _fold_sign(work.view(kind))
    return keys.masked_fill_(work.isnan(), limits.max if op is ReduceOp.MAX else limits.min)


def _from_order_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    return _fold_sign(keys).view(dtype)


def _fold_sign(bits: Tensor) -> Tensor:
    """Reverse the order of the negative ones: floats are sign and magnitude. Its own inverse."""
    limits = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (limits.bits - 1)) & limits.max)
