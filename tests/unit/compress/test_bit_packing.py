"""Codes of a few bits side by side in bytes."""

from __future__ import annotations

import pytest
import torch

from mpisgd.compress import bit_packing
from mpisgd.compress.bit_packing import pack, packed_size, unpack

SIZES = (0, 1, 2, 7, 8, 9, 1001)


def codes_of(numel: int, bits: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(100 * numel + bits)
    return torch.randint(2**bits, (numel,), generator=source, dtype=torch.uint8)


@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_survive_in_the_bytes_they_need(bits):
    for numel in SIZES:
        codes = codes_of(numel, bits)
        packed = pack(codes, bits)
        assert packed.dtype is torch.uint8
        assert len(packed) == packed_size(numel, bits) == -(-numel * bits // 8)
        assert unpack(packed, bits, numel).tolist() == codes.tolist()


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_bits_lie_in_order(bits):
    codes = codes_of(21, bits)
    whole = sum(code << (index * bits) for index, code in enumerate(codes.tolist()))
    assert bytes(pack(codes, bits).tolist()) == whole.to_bytes(packed_size(21, bits), "little")


@pytest.mark.parametrize("bits", range(1, 9))
def test_the_operations_for_devices_lay_them_alike(bits):
    for numel in SIZES:
        codes = codes_of(numel, bits)
        packed = bit_packing._from_bits(bit_packing._to_bits(codes, bits), 8)
        assert packed.tolist() == pack(codes, bits).tolist()
        assert bit_packing._from_bits(bit_packing._to_bits(packed, 8)[: numel * bits], bits).tolist() == (
            codes.tolist()
        )


def test_eight_signs_make_a_byte():
    assert pack(torch.tensor([1, 0, 0, 0, 0, 0, 0, 1, 1], dtype=torch.uint8), 1).tolist() == [0b10000001, 1]
