"""Mean and variance out of the pieces of several ranks, computed in one process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mpisgd.nn.batch_statistics import combine, local_row


def batches(counts: list[int], dtype: torch.dtype = torch.float64, shift: float = 0.0) -> list[torch.Tensor]:
    """One batch per rank, of 3 channels; every rank and channel has a mean of its own."""
    draw = torch.Generator().manual_seed(len(counts))
    step = torch.tensor([1.0, -2.0, 5.0], dtype=torch.float64).view(3, 1)
    return [
        (torch.randn(count, 3, 2, generator=draw, dtype=torch.float64) + rank * step + shift).to(dtype)
        for rank, count in enumerate(counts)
    ]


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_pieces_of_any_sizes_have_the_moments_of_the_whole(counts):
    pieces = batches(counts)
    found = combine(torch.stack([local_row(piece) for piece in pieces]))
    assert found.count == 2 * sum(counts)
    if found.count:
        var, mean = torch.var_mean(torch.cat(pieces), dim=(0, 2), correction=0)
        torch.testing.assert_close(found.mean, mean, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(found.var, var, rtol=1e-13, atol=1e-13)


def test_nobody_has_anything():
    found = combine(torch.stack([local_row(torch.empty(0, 3, 4, 4)) for _ in range(3)]))
    assert found.count == 0
    assert not found.mean.any()
    assert not found.var.any()


def test_a_large_mean_takes_no_digits_from_the_variance():
    """The difference of mean square and squared mean would be off by about 1 here."""
    pieces = batches([4, 7, 5], shift=1e8)
    found = combine(torch.stack([local_row(piece) for piece in pieces]))
    torch.testing.assert_close(found.var, torch.cat(pieces).var((0, 2), correction=0), rtol=1e-7, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_types_are_not_rounded_to_them(dtype):
    (piece,) = batches([50], dtype)
    exact = piece.double().mean((0, 2))
    assert (exact.to(dtype).double() - exact).abs().max() > 1e-5
    torch.testing.assert_close(combine(local_row(piece)[None]).mean, exact, rtol=1e-6, atol=1e-6)


def test_counts_may_be_too_large_for_float32():
    rows = torch.tensor([[0.0, 1.0, 2.0**24 + 1], [0.0, 1.0, 2.0**24 + 1]], dtype=torch.float64)
    assert combine(rows).count == 2**25 + 2
