"""Which reductions exist for which dtype, and the arithmetic behind them.

Two forms of a tensor are reduced: the form MPI adds (its own element types), and the form torch adds
(torch has no arithmetic for uint16 to uint64, so those are mapped onto signed integers of the same width).
Half types are summed in float32 and rounded once, whoever adds.
"""

import enum
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from mpisgd.arguments import shown
from mpisgd.errors import UnsupportedOp

__all__ = [
    "ADDED_AS_THEY_ARE",
    "ReduceOp",
    "check_op",
    "combine",
    "combine_in_rank_order",
    "for_mpi",
    "for_torch",
]


class ReduceOp(enum.Enum):
    """How elements of several ranks become one; the names are torch.distributed's.

    bool: SUM and MAX are OR, PRODUCT and MIN are AND; there is no AVG. AVG is SUM divided by the number of
    ranks; of integers the quotient is truncated toward zero, as NCCL does it. BAND, BOR and BXOR are for
    integers and bool.
    """

    SUM = "SUM"
    AVG = "AVG"
    PRODUCT = "PRODUCT"
    MIN = "MIN"
    MAX = "MAX"
    BAND = "BAND"
    BOR = "BOR"
    BXOR = "BXOR"

    __hash__ = object.__hash__  # there is one of each, and Enum's own is ten times slower

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"


HALF_TYPES = (torch.float16, torch.bfloat16)
UNSIGNED_AS_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
FLOATING = (*HALF_TYPES, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED_AS_SIGNED)
REDUCIBLE = (*FLOATING, *COMPLEX, *INTEGER, torch.bool)

# Open MPI's vector instructions saturate where sums of these should wrap around (its issue 8045).
NARROW = (torch.uint8, torch.int8, torch.uint16, torch.int16)
# A count of ranks fits into these, in which the integers are divided.
WIDER = {torch.uint32: torch.int64, **dict.fromkeys(NARROW, torch.int32)}
# Integers of the same width, whose order floating numbers can be given.
ORDER_KEYS = {torch.float32: torch.int32, torch.float64: torch.int64}

# From so many elements on, an average in one pass takes two thirds of the time of two.
AT_ONCE_NUMEL = 2**13

# torch adds these as they are; the others go through `for_torch`.
ADDED_AS_THEY_ARE = (
    *(torch.float32, torch.float64, *COMPLEX),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)

BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
ORDERED = (ReduceOp.MIN, ReduceOp.MAX)

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
# bool travels as bytes of 0 and 1, where OR is the maximum and AND the minimum.
BOOL_OPS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.BAND: ReduceOp.MIN,
}

Finish = Callable[[Tensor], Tensor]


def check_op(name: str, op: object, dtype: torch.dtype) -> ReduceOp:
    """Return `op` as ours (torch.distributed's are taken too), or raise where the dtype does not have it."""
    ours = _as_ours(name, op)
    if dtype not in REDUCIBLE:
        raise UnsupportedOp(f"{name}: {dtype} has no reduction; convert the tensor, or send it as it is")
    if ours is ReduceOp.AVG and dtype is torch.bool:
        raise UnsupportedOp(f"{name}: AVG of {dtype} is not defined; convert the tensor to numbers")
    if ours in BITWISE and dtype not in (*INTEGER, torch.bool):
        raise UnsupportedOp(f"{name}: {ours.name} needs an integer or bool tensor, got {dtype}")
    if ours in ORDERED and dtype in COMPLEX:
        raise UnsupportedOp(f"{name}: {ours.name} of {dtype} is not defined: complex numbers have no order")
    return ours


def _as_ours(name: str, op: object) -> ReduceOp:
    if isinstance(op, ReduceOp):
        return op
    text = str(op).rpartition(".")[2]  # torch's own prints as RedOpType.SUM
    if "RedOpType" in str(op) and text in ReduceOp.__members__:
        return ReduceOp[text]
    raise UnsupportedOp(f"{name}: op={shown(op)}; expected one of " + ", ".join(ReduceOp.__members__))


def for_mpi(flat: Tensor, op: ReduceOp, size: int) -> tuple[Tensor, str, Finish]:
    """Return (`flat` in a form MPI adds, MPI's operation, what makes the result of it).

    The first may share memory with `flat`.
    """
    if flat.dtype is torch.bool:
        return flat.view(torch.uint8), BOOL_OPS.get(op, op).name, _as_bool
    added = ReduceOp.SUM if op is ReduceOp.AVG else op
    if flat.dtype in NARROW and op not in BITWISE:
        return flat.to(torch.int32), added.name, _finish_average(op, size, flat.dtype)
    if flat.dtype in UNSIGNED_AS_SIGNED and op in ORDERED:  # wrong in Open MPI 4.1 (its issue 10648)
        work, _, finish = _unsigned(flat, op)
        return work, op.name, finish
    work = flat.float() if flat.dtype in HALF_TYPES else flat
    if op in ORDERED and work.dtype in ORDER_KEYS:
        return _order_keys(work, op), op.name, lambda keys: _from_order_keys(keys, work.dtype).to(flat.dtype)
    return work, added.name, _finish_average(op, size, flat.dtype)


def for_torch(flat: Tensor, op: ReduceOp, size: int) -> tuple[Tensor, ReduceOp, Finish]:
    """Return (`flat` in a form torch adds, the operation on it, what makes the result of it).

    The first may share memory with `flat`.
    """
    if flat.dtype is torch.bool:
        return flat.view(torch.uint8), BOOL_OPS.get(op, op), _as_bool
    added = ReduceOp.SUM if op is ReduceOp.AVG else op
    if flat.dtype in UNSIGNED_AS_SIGNED:
        work, _, finish = _unsigned(flat, added)
        return work, added, lambda work: _finish_average(op, size, flat.dtype)(finish(work))
    work = flat.float() if flat.dtype in HALF_TYPES else flat
    return work, added, _finish_average(op, size, flat.dtype)


def _as_bool(work: Tensor) -> Tensor:
    return work.view(torch.bool)


def _order_keys(work: Tensor, op: ReduceOp) -> Tensor:
    """Return integers ordered as the floating numbers are, with NaN beyond all of them.

    MPI compares with `a > b ? a : b`: whether NaN wins then depends on who holds it, and ranks may even
    end with different results. As integers NaN always wins, as in torch, and -0 is less than +0.
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


def _finish_average(op: ReduceOp, size: int, dtype: torch.dtype) -> Finish:
    """Return what divides a sum where that is asked for; a half is rounded after that, an integer before."""

    def finish(work: Tensor) -> Tensor:
        if op is not ReduceOp.AVG:
            return work.to(dtype)
        return divide(work.to(dtype), size) if dtype in INTEGER else divide(work, size).to(dtype)

    return finish


def _unsigned(flat: Tensor, op: ReduceOp) -> tuple[Tensor, ReduceOp, Finish]:
    """Sums, products and bit operations wrap alike; for the order of numbers the sign bit is flipped."""
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
        op: AVG divides by the number of pieces before a half type is rounded.
        out: [n] of the same dtype, overwritten and returned; it may be one of the first two pieces, which
            are the first to be read, and overlaps no other.
    """
    dtype = pieces[0].dtype
    if dtype in ADDED_AS_THEY_ARE or (len(pieces) == 2 and dtype in HALF_TYPES and op is not ReduceOp.AVG):
        return _combine_directly(pieces, op, torch.empty_like(pieces[0]) if out is None else out)
    total, arithmetic, finish = for_torch(pieces[0], op, len(pieces))
    total = total.clone() if total.data_ptr() == pieces[0].data_ptr() else total
    for piece in pieces[1:]:
        combine(arithmetic, total, for_torch(piece, op, len(pieces))[0])
    return finish(total) if out is None else out.copy_(finish(total))


def _combine_directly(pieces: Sequence[Tensor], op: ReduceOp, out: Tensor) -> Tensor:
    """The same where torch can add the dtype itself: one pass less.

    Of two halves torch rounds the sum once, as we want it.
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
