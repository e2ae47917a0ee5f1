"""How tensors look to MPI: an address, a count that fits a C int, an element type.

Tensors travel by address. `tensor.numpy()` would mark the storage as not resizable, which breaks code that
frees and refills storages (FSDP does); an address has no such effect, but it holds no reference either:
whoever starts a transfer keeps the tensor until it is done.
"""

import functools

import torch
from mpi4py import MPI
from torch import Tensor

from mpisgd.errors import UnsupportedOp

__all__ = ["ELEMENT_TYPES", "OPERATIONS", "address", "native", "pieces", "spec"]

# MPI counts elements in a C int. Bytes beyond it travel as one element of a datatype that spans them all.
MAX_COUNT = 2**31 - 1
SPAN_BLOCK = 2**20
# Reductions need MPI's own element types, so long tensors are reduced in pieces of this many elements.
MAX_REDUCE_COUNT = 2**28

ELEMENT_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
OPERATIONS = {
    "SUM": MPI.SUM,
    "PRODUCT": MPI.PROD,
    "MIN": MPI.MIN,
    "MAX": MPI.MAX,
    "BAND": MPI.BAND,
    "BOR": MPI.BOR,
    "BXOR": MPI.BXOR,
}

BufferSpec = list[MPI.buffer | int | MPI.Datatype]


@functools.lru_cache(maxsize=256)
def span(nbytes: int) -> MPI.Datatype:
    """Return a committed datatype of exactly `nbytes` bytes, kept for the next time."""
    blocks, rest = divmod(nbytes, SPAN_BLOCK)
    block = MPI.BYTE.Create_contiguous(SPAN_BLOCK)
    body = block.Create_contiguous(blocks)
    whole = MPI.Datatype.Create_struct([1, rest], [0, blocks * SPAN_BLOCK], [body, MPI.BYTE])
    block.Free()
    body.Free()
    return whole.Commit()


def address(tensor: Tensor) -> MPI.buffer:
    """Return the memory of a contiguous tensor, without a reference to it."""
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)


def spec(tensor: Tensor, parts: int = 1) -> BufferSpec:
    """Describe a tensor to MPI as bytes; `parts`: how many equal pieces MPI will see in it.

    The size of a piece decides, so that both sides of a transfer use the same datatype: Intel MPI 2021.18
    delivers wrong bytes where an all-gather sends bytes and receives a datatype of as many.
    """
    nbytes = tensor.nbytes // parts
    if nbytes <= MAX_COUNT:
        return [address(tensor), nbytes, MPI.BYTE]
    return [address(tensor), 1, span(nbytes)]


def pieces(tensor: Tensor) -> list[Tensor]:
    """Cut a flat tensor into pieces whose elements MPI can count."""
    if tensor.numel() <= MAX_REDUCE_COUNT:
        return [tensor]
    return [tensor[start : start + MAX_REDUCE_COUNT] for start in range(0, tensor.numel(), MAX_REDUCE_COUNT)]


def native(op: str, dtype: torch.dtype) -> tuple[MPI.Op, MPI.Datatype]:
    """Return MPI's operation and element type. Never hands MPI what it does not know how to add."""
    if dtype not in ELEMENT_TYPES:
        raise UnsupportedOp(f"MPI has no arithmetic for {dtype}")
    return OPERATIONS[op], ELEMENT_TYPES[dtype]
