"""The arithmetic of reductions in torch.

torch has no arithmetic for uint16 to uint64, so those are mapped onto signed integers of the same width.
16-bit floats are summed in float32 and rounded once. What MPI's reductions need is in `mpi_reduction`.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mpisgd.dtypes import (
    BOOL_OPS,
    COMPLEX,
    HALF_DTYPES,
    INTEGER,
    ORDERED,
    SUMMED_IN_FLOAT32,
    UNSIGNED_AS_SIGNED,
    ReduceOp,
)

__all__ = [
    "ADDED_AS_THEY_ARE",
    "Finish",
    "as_bool",
    "as_signed",
    "combine",
    "combine_in_rank_order",
    "divide",
    "finish_average",
    "for_torch",
]

# From so many elements on, an average in one pass takes two thirds of the time of two.
AT_ONCE_NUMEL = 2**13

# Open MPI's vector instructions saturate where sums of these should wrap around (its issue 8045).
NARROW = (torch.uint8, torch.int8, torch.uint16, torch.int16)
# A count of ranks fits into these, in which the integers are divided.
WIDER = {torch.uint32: torch.int64, **dict.fromkeys(NARROW, torch.int32)}

# torch adds these as they are; the others go through `for_torch`.
ADDED_AS_THEY_ARE = (
    *(torch.float32, torch.float64, *COMPLEX),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)

COMBINE: dict[ReduceOp, Callable[..., Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}
Finish = Callable[[Tensor], Tensor]


def for_torch(flat: Tensor, op: ReduceOp, size: int) -> tuple[Tensor, ReduceOp, Finish]:
    """Return (`flat` in a form torch adds, the operation on it, what makes the result of it).

    The first may share memory with `flat`.
    """
    if flat.dtype is torch.bool:
        return flat.view(torch.uint8), BOOL_OPS.get(op, op), as_bool
    added = ReduceOp.SUM if op is ReduceOp.AVG else op
    if flat.dtype in UNSIGNED_AS_SIGNED:
        work, _, finish = as_signed(flat, added)
        return work, added, lambda work: finish_average(op, size, flat.dtype)(finish(work))
    work = flat.float() if flat.dtype in SUMMED_IN_FLOAT32 else flat
    return work, added, finish_average(op, size, flat.dtype)


def as_bool(work: Tensor) -> Tensor:
    """Return bytes of 0 and 1 as bool, in the same memory."""
    return work.view(torch.bool)


def finish_average(op: ReduceOp, size: int, dtype: torch.dtype) -> Finish:
    """Return a function that divides a sum where `op` is AVG, and then converts it to `dtype`."""

    def finish(work: Tensor) -> Tensor:
        if op is not ReduceOp.AVG:
            return work.to(dtype)
        return divide(work.to(dtype), size) if dtype in INTEGER else divide(work, size).to(dtype)

    return finish


def as_signed(flat: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp, Finish]:
    """Return `for_torch` of unsigned integers, as signed ones of the same width.

    Sums, products and bit operations wrap alike; for the order of numbers the sign bit is flipped.
    """
    signed = flat.view(UNSIGNED_AS_SIGNED[flat.dtype])
    if op not in ORDERED:
        return signed, op, lambda work: work.view(flat.dtype)
    sign_bit = torch.iinfo(signed.dtype).min
    return signed ^ sign_bit, op, lambda work: (work ^ sign_bit).view(flat.dtype)


def divide(total: Tensor, count: int) -> Tensor:
    """Divide `total` by `count` in place, integers toward zero as in C; return it.

    To multiply by the inverse of a power of two gives the same bits, in half the time.
    """
    if total.dtype in INTEGER:
        return _divide_integers(total, count)
    if count & (count - 1) == 0 and not total.is_complex():
        return total.mul_(1 / count)
    return total.div_(count)


def _divide_integers(total: Tensor, count: int) -> Tensor:
    if total.dtype is torch.uint64:  # torch has no arithmetic for it, and nothing wider
        numbers = total.numpy()
        np.floor_divide(numbers, count, out=numbers)
        return total
    wide = total.to(WIDER.get(total.dtype, total.dtype)).div_(count, rounding_mode="trunc")
    return total if wide.dtype == total.dtype else total.copy_(wide)


def combine(op: ReduceOp, into: Tensor, other: Tensor) -> None:
    """`into` becomes `into` op `other`, element by element; both in `for_torch`'s form."""
    COMBINE[op](into, other, out=into)


def combine_in_rank_order(pieces: Sequence[Tensor], op: ReduceOp, out: Tensor | None = None) -> Tensor:
    """Return the combination of one piece per rank, in rank order: the oracle of every fast reduction.

    Args:
        pieces: one [n] tensor per rank, of any reducible dtype; unchanged.
        op: AVG divides by the number of pieces before a 16-bit float is rounded.
        out: [n] of the same dtype, overwritten and returned; it may be one of the first two pieces, which
            are the first to be read, and overlaps no other.
    """
    dtype = pieces[0].dtype
    if dtype in ADDED_AS_THEY_ARE or (len(pieces) == 2 and dtype in HALF_DTYPES and op is not ReduceOp.AVG):
        return _combine_directly(pieces, op, torch.empty_like(pieces[0]) if out is None else out)
    total, arithmetic, finish = for_torch(pieces[0], op, len(pieces))
    total = total.clone() if total.data_ptr() == pieces[0].data_ptr() else total
    for piece in pieces[1:]:
        combine(arithmetic, total, for_torch(piece, op, len(pieces))[0])
    return finish(total) if out is None else out.copy_(finish(total))


def _combine_directly(pieces: Sequence[Tensor], op: ReduceOp, out: Tensor) -> Tensor:
    """The same where torch can add the dtype itself: one pass less.

    Of two 16-bit floats torch rounds the sum once, as we want it.
    """
    if len(pieces) == 1:
        return out.copy_(pieces[0])
    call = COMBINE[op]
    at_once = op is ReduceOp.AVG and _in_one_pass(out, len(pieces))
    total = pieces[0]
    for piece in pieces[1:-1] if at_once else pieces[1:]:
        total = call(total, piece, out=out)
    if at_once:
        return _add_and_divide(total, pieces[-1], len(pieces), out)
    return divide(out, len(pieces)) if op is ReduceOp.AVG else out


def _in_one_pass(out: Tensor, count: int) -> bool:
    """Return whether to add and divide in one pass: for a small message that takes longer than two."""
    return out.numel() >= AT_ONCE_NUMEL and count & (count - 1) == 0 and out.is_floating_point()


def _add_and_divide(total: Tensor, piece: Tensor, count: int, out: Tensor) -> Tensor:
    """Put (total + piece) / count into `out`, for a power of two.

    Numbers scaled by one keep their bits, so the sum may be rounded after the division as well as before:
    it is only at the ends of the range that this overflows later, and rounds subnormal numbers twice.
    """
    share = 1 / count
    torch.addr(total.unsqueeze(1), piece, out.new_ones(1), beta=share, alpha=share, out=out.unsqueeze(1))
    return out
