"""Codes of a few bits side by side in bytes: eight signs, or four numbers below four, in one byte.

Code i has the bits [i * bits, (i + 1) * bits) of the whole, counted from each byte's least significant bit.
Byte 0 of codes a, b, c, ... of three bits, its most significant bit first:

    c1 c0 b2 b1 b0 a2 a1 a0
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["pack", "packed_size", "unpack"]


def packed_size(numel: int, bits: int) -> int:
    """Return how many bytes `numel` codes of `bits` bits take."""
    return (numel * bits + 7) // 8


def pack(codes: Tensor, bits: int, out: Tensor | None = None) -> Tensor:
    """Return codes side by side in bytes; the last byte is filled up with zeros.

    Args:
        codes: [n] uint8, each below 2 ** bits; unchanged.
        bits: of each code, 1 to 8.
        out: where the result is written, [packed_size(n, bits)] uint8 on the device of `codes`; None: to new
            memory.
    """
    _check(codes, bits)
    if out is None:
        out = codes.new_empty(packed_size(codes.numel(), bits))
    if 8 % bits == 0 and bits > 1:
        return _pack_evenly(codes, bits, out)
    if codes.device.type == "cpu":
        array = codes.numpy()
        if bits > 1:
            array = np.unpackbits(array[:, None], axis=1, count=bits, bitorder="little").reshape(-1)
        return out.copy_(torch.from_numpy(np.packbits(array, bitorder="little")))
    return out.copy_(_from_bits(_to_bits(codes, bits), 8))


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the codes that `pack` has packed.

    Args:
        packed: [packed_size(numel, bits)] uint8; unchanged.
        bits: of each code, 1 to 8.
        numel: how many codes there are.

    Returns:
        [numel] uint8, new memory, on the device of `packed`.
    """
    _check(packed, bits)
    assert packed.numel() == packed_size(numel, bits), f"{packed.numel()} bytes of {numel} codes"
    if bits == 8:
        return packed.clone()
    if 8 % bits == 0 and bits > 1:
        return _unpack_evenly(packed, bits, numel)
    if packed.device.type == "cpu":
        array = np.unpackbits(packed.numpy(), count=numel * bits, bitorder="little")
        if bits > 1:
            array = np.packbits(array.reshape(numel, bits), axis=1, bitorder="little").reshape(-1)
        return torch.from_numpy(array)
    return _from_bits(_to_bits(packed, 8)[: numel * bits], bits)


def _pack_evenly(codes: Tensor, bits: int, out: Tensor) -> Tensor:
    """Return codes of 2, 4 or 8 bits in bytes, of which no code spans two."""
    each = 8 // bits
    out.copy_(codes[::each])
    for place in range(1, each):
        some = codes[place::each]
        out[: some.numel()] |= some << place * bits
    return out


def _unpack_evenly(packed: Tensor, bits: int, numel: int) -> Tensor:
    """Return the codes of 2 or 4 bits."""
    each = 8 // bits
    codes = packed.new_empty(packed.numel(), each)
    for place in range(each):
        torch.bitwise_right_shift(packed, place * bits, out=codes[:, place])
    return codes.bitwise_and_(2**bits - 1).view(-1)[:numel]


def _check(tensor: Tensor, bits: int) -> None:
    assert 1 <= bits <= 8, f"codes of {bits} bits"
    assert tensor.dtype is torch.uint8, tensor.dtype
    assert tensor.dim() == 1, tuple(tensor.shape)


def _to_bits(codes: Tensor, bits: int) -> Tensor:
    """Return [n * bits] zeros and ones, the lowest bit of each code first."""
    shifts = torch.arange(bits, dtype=torch.uint8, device=codes.device)
    return ((codes[:, None] >> shifts) & 1).reshape(-1)


def _from_bits(ones: Tensor, bits: int) -> Tensor:
    """Return codes of `bits` bits from zeros and ones, the last one filled up with zeros."""
    padded = torch.nn.functional.pad(ones, (0, -ones.numel() % bits))
    shifts = torch.arange(bits, dtype=torch.uint8, device=ones.device)
    return (padded.reshape(-1, bits) << shifts).sum(dim=1, dtype=torch.uint8)
