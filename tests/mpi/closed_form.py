"""Inputs as a formula of rank and element, and what collectives must make of them, worked out locally.

The arithmetic is numpy's, which shares nothing with what is tested.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mpisgd import ReduceOp

HALF_DTYPES = [torch.float16, torch.bfloat16]
FLOATS = [*HALF_DTYPES, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
UNSIGNED = [torch.uint8, torch.uint16, torch.uint32, torch.uint64]
SIGNED = [torch.int8, torch.int16, torch.int32, torch.int64]
INTEGERS = [*UNSIGNED, *SIGNED]
DTYPES = [*FLOATS, *COMPLEX, *INTEGERS, torch.bool]

# Relative error that a sum or product of a few numbers may have.
TOLERANCE = {
    torch.float32: 1e-6,
    torch.float64: 1e-14,
    torch.complex64: 1e-6,
    torch.complex128: 1e-14,
}

NUMPY_OPS: dict[ReduceOp, Callable[..., np.ndarray]] = {
    ReduceOp.SUM: np.add,
    ReduceOp.AVG: np.add,
    ReduceOp.PRODUCT: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
BITWISE = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def given(rank: int, dtype: torch.dtype, shape: Sequence[int] = (131,)) -> Tensor:
    """What rank `rank` puts in: different for every rank and every element."""
    numel, period = math.prod(shape), _period(rank, dtype)
    if numel > len(period):
        period = period.repeat(-(-numel // len(period)))
    return period[:numel].clone().reshape(tuple(shape))


@functools.lru_cache(maxsize=1024)
def _period(rank: int, dtype: torch.dtype) -> Tensor:
    """What `given` repeats from its first element on."""
    if dtype is torch.bool:
        return torch.from_numpy((np.arange(3) + rank) % 3 == 0)
    if dtype in COMPLEX:
        place = np.arange(19 * 17)
        real, imag = (place * 7 + rank * 13) % 19 - 9, (place * 5 + rank * 11) % 17 - 8
        return torch.from_numpy(real / 7 + imag / 9 * 1j).to(dtype)
    if dtype in FLOATS:
        return torch.from_numpy(((np.arange(101) * 7 + rank * 13) % 101 - 50) / 7).to(dtype)
    return torch.from_numpy(_integers(np.arange(2 * 11), rank, dtype))


def _integers(place: np.ndarray, rank: int, dtype: torch.dtype) -> np.ndarray:
    """Small and very large numbers in turn: sums wrap around, and the order needs the sign bit."""
    kind = np.dtype(str(dtype).removeprefix("torch."))
    small = ((place * 5 + rank * 3) % 11 + 1).astype(kind)
    large = np.array(np.iinfo(kind).max, dtype=kind) - small
    return np.where((place + rank) % 2 == 0, small, large).astype(kind)


def supports(op: ReduceOp, dtype: torch.dtype) -> bool:
    """Whether torch.distributed's rules give `dtype` this op."""
    if op is ReduceOp.AVG:
        return dtype is not torch.bool
    if op in BITWISE:
        return dtype in [*INTEGERS, torch.bool]
    return dtype not in COMPLEX or op not in (ReduceOp.MIN, ReduceOp.MAX)


def ops_of(dtype: torch.dtype) -> list[ReduceOp]:
    return [op for op in ReduceOp if supports(op, dtype)]


def combined(inputs: Sequence[Tensor], op: ReduceOp) -> Tensor:
    """The combination of one tensor per rank, in rank order."""
    dtype = inputs[0].dtype
    if dtype in HALF_DTYPES:
        return combined([tensor.float() for tensor in inputs], op).to(dtype)
    arrays = [tensor.numpy() for tensor in inputs]
    if dtype is torch.bool and op is ReduceOp.BXOR:
        total = functools.reduce(np.logical_xor, arrays)
    else:
        total = functools.reduce(NUMPY_OPS[op], arrays)
    if op is ReduceOp.AVG:
        total = _truncated(total, len(arrays)) if dtype in INTEGERS else total / total.dtype.type(len(arrays))
    return torch.from_numpy(np.asarray(total)).reshape(inputs[0].shape)


def _truncated(total: np.ndarray, count: int) -> np.ndarray:
    """The quotient cut off toward zero; numpy's own rounds down."""
    low = total // total.dtype.type(count)
    return low + ((low < 0) & (low * total.dtype.type(count) != total)).astype(total.dtype)


def assert_equal(got: Tensor, wanted: Tensor) -> None:
    """Equal in every bit that counts."""
    assert got.dtype == wanted.dtype
    assert torch.equal(got, wanted), f"{got} is not {wanted}"


def assert_near(got: Tensor, wanted: Tensor) -> None:
    """Equal, up to the order of floating-point sums. 16-bit floats are exact: float32, one rounding."""
    if got.dtype in TOLERANCE:
        tolerance = TOLERANCE[got.dtype]
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * 10)
    else:
        assert_equal(got, wanted)
