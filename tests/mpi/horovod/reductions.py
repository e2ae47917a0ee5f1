"""What Horovod's reductions must make of one tensor per rank, worked out locally."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from closed_form import COMPLEX, DTYPES, FLOATS, assert_near, combined, given
from torch import Tensor

import mpisgd.horovod as hvd
from mpisgd import ReduceOp

OPS = {
    "Average": ReduceOp.SUM,
    "Sum": ReduceOp.SUM,
    "Min": ReduceOp.MIN,
    "Max": ReduceOp.MAX,
    "Product": ReduceOp.PRODUCT,
}


def dtypes_of(op: str) -> list[torch.dtype]:
    """The dtypes that have a reduction."""
    without = {"Average": [torch.bool], "Min": COMPLEX, "Max": COMPLEX}
    return [dtype for dtype in DTYPES if dtype not in without.get(op, [])]


def everyones(dtype: torch.dtype, shape: Sequence[int] = (131,)) -> list[Tensor]:
    """What each rank gives."""
    return [given(rank, dtype, shape) for rank in range(hvd.size())]


def wanted(op: str, tensors: Sequence[Tensor]) -> Tensor:
    """The reduction; averages of integers are cut off toward zero."""
    total = combined(tensors, OPS[op])
    if op != "Average" or len(tensors) == 1:
        return total
    if total.dtype in (torch.float16, torch.bfloat16):
        return total / len(tensors)  # the sum is rounded, then its quotient, as in Horovod
    if total.dtype in FLOATS + COMPLEX:
        return total / len(tensors)
    return (total.double() * (1 / len(tensors))).trunc().to(total.dtype)


def near(got: Tensor, right: Tensor) -> None:
    """Equal up to rounding: a quotient may be a product, which 16-bit floats show in the last bit."""
    if got.dtype in (torch.float16, torch.bfloat16):
        torch.testing.assert_close(got, right, rtol=2 * torch.finfo(got.dtype).eps, atol=1e-3)
    else:
        assert_near(got, right)
