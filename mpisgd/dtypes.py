"""Which reductions exist for which dtype, and what dtypes are called in files."""

import enum
import functools

import torch

from mpisgd.arguments import shown
from mpisgd.errors import UnsupportedOp

__all__ = ["SAFETENSORS_DTYPES", "ReduceOp", "as_reduce_op", "check_op", "dtype_name"]


class ReduceOp(enum.Enum):
    """How elements of several ranks are combined; the names are those of torch.distributed.

    AVG is SUM divided by the number of ranks; the quotient of integers is truncated toward zero, as in NCCL.
    For bool, SUM and MAX are a logical OR, PRODUCT and MIN a logical AND, and AVG is not defined. BAND, BOR
    and BXOR are defined for integers and bool only, MIN and MAX not for complex numbers.
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


HALF_DTYPES = (torch.float16, torch.bfloat16)
# Sums of these are taken in float32 and rounded once.
SUMMED_IN_FLOAT32 = HALF_DTYPES
UNSIGNED_AS_SIGNED = {
    torch.uint16: torch.int16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}
FLOATING = (*HALF_DTYPES, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
INTEGER = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, *UNSIGNED_AS_SIGNED)
REDUCIBLE = (*FLOATING, *COMPLEX, *INTEGER, torch.bool)


# Names of dtypes in the header of a safetensors file.
SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.complex128: "C128",  # of mpisgd: safetensors has none
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

BITWISE = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
ORDERED = (ReduceOp.MIN, ReduceOp.MAX)

# bool travels as bytes of 0 and 1, where OR is the maximum and AND the minimum.
BOOL_OPS = {
    ReduceOp.SUM: ReduceOp.MAX,
    ReduceOp.PRODUCT: ReduceOp.MIN,
    ReduceOp.BOR: ReduceOp.MAX,
    ReduceOp.BAND: ReduceOp.MIN,
}


def check_op(name: str, op: object, dtype: torch.dtype) -> ReduceOp:
    """Return `op` as ours, or raise where the dtype does not have it. Names and torch's are taken, too."""
    ours = as_reduce_op(name, op)
    if dtype not in REDUCIBLE:
        raise UnsupportedOp(f"{name}: {dtype} has no reduction; convert the tensor, or send it as it is")
    if ours is ReduceOp.AVG and dtype is torch.bool:
        raise UnsupportedOp(f"{name}: AVG of {dtype} is not defined; convert the tensor to numbers")
    if ours in BITWISE and dtype not in (*INTEGER, torch.bool):
        raise UnsupportedOp(f"{name}: {ours.name} needs an integer or bool tensor, got {dtype}")
    if ours in ORDERED and dtype in COMPLEX:
        raise UnsupportedOp(f"{name}: {ours.name} of {dtype} is not defined: complex numbers have no order")
    return ours


def as_reduce_op(name: str, op: object) -> ReduceOp:
    """Return a ReduceOp, a name of one such as "avg", or one of torch.distributed's as ours.

    Raises:
        UnsupportedOp: it is none; `name` is the function that was called with it.
    """
    if isinstance(op, ReduceOp):
        return op
    if isinstance(op, str) and op.upper() in ReduceOp.__members__:
        return ReduceOp[op.upper()]
    text = str(op).rpartition(".")[2]  # torch's own prints as RedOpType.SUM
    if "RedOpType" in str(op) and text in ReduceOp.__members__:
        return ReduceOp[text]
    raise UnsupportedOp(f"{name}: op={shown(op)}; expected one of " + ", ".join(ReduceOp.__members__))


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return `float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
