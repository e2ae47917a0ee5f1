"""A fingerprint tells tensors apart by any bit and by its place, whatever they are made of."""

from __future__ import annotations

import itertools

import pytest
import torch

from mpisgd.parameters import fingerprint as module
from mpisgd.parameters.fingerprint import fingerprints

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.complex64]


def drawn(numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)


def of(tensor: torch.Tensor) -> int:
    return fingerprints([tensor])[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 3, 1001])
def test_copies_have_the_same_wherever_they_lie(dtype, numel):
    tensor = drawn(numel + 1, dtype)[1:]
    assert of(tensor) == of(tensor.clone())
    strided = torch.stack([tensor, tensor], dim=1)[:, 0]
    assert of(strided) == of(tensor)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_bit_counts(dtype, monkeypatch):
    monkeypatch.setattr(module, "CHUNK", 2)
    bits = drawn(5, dtype).view(torch.uint8)
    seen = {of(bits.view(dtype))}
    for byte, bit in itertools.product(range(bits.numel()), range(1 if dtype == torch.bool else 8)):
        other = bits.clone()
        other[byte] ^= 1 << bit
        seen.add(of(other.view(dtype)))
    assert len(seen) == 1 + bits.numel() * (1 if dtype == torch.bool else 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_two_flipped_signs_do_not_cancel(dtype):
    tensor = drawn(50, dtype)
    seen = {of(tensor)}
    for i, j in itertools.combinations(range(50), 2):
        other = tensor.clone()
        other[[i, j]] = -other[[i, j]]
        seen.add(of(other))
    assert len(seen) == 1 + 50 * 49 // 2


@pytest.mark.parametrize("apart", [1, 2, 3, 70_000])
def test_the_order_counts_within_and_between_chunks(apart):
    tensor = drawn(140_001)
    assert of(tensor) != of(tensor.roll(apart))


def test_not_a_number_has_a_fingerprint_too():
    tensor = torch.tensor([1.0, float("nan"), float("inf")])
    assert of(tensor) == of(tensor.clone())


def test_sparse_tensors_by_their_indices_and_values():
    def sparse(place: int, value: float) -> torch.Tensor:
        return torch.sparse_coo_tensor([[place]], [value], (5,), check_invariants=True)

    assert of(sparse(1, 2.0)) == of(sparse(1, 2.0))
    assert len({of(sparse(1, 2.0)), of(sparse(2, 2.0)), of(sparse(1, 3.0))}) == 3


def test_every_tensor_of_a_list_has_its_own():
    tensors = [drawn(n) for n in (0, 1, 7, 70_000)]
    assert fingerprints(tensors) == [of(tensor) for tensor in tensors]
    assert fingerprints([]) == []
