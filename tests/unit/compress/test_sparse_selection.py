"""Which elements travel: exactly the largest, whatever way they are searched."""

from __future__ import annotations

import pytest
import torch

from mpisgd.compress.selection import SAMPLED_FROM, at_least, count_of, top_k, top_k_of_each
from mpisgd.methods.random_k.random_k import random_indices


def normal(numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel))


@pytest.mark.parametrize(
    ("numel", "k"), [(1, 1), (10, 3), (10, 10), (2 * SAMPLED_FROM + 17, 3), (2 * SAMPLED_FROM + 17, 20_000)]
)
def test_top_k_is_exact(numel, k):
    flat = normal(numel)
    expected = set(flat.abs().argsort(descending=True)[:k].tolist())
    assert set(top_k(flat, k).tolist()) == expected


def test_a_sample_that_misleads_changes_nothing_but_the_time():
    flat = torch.zeros(2 * SAMPLED_FROM)
    flat[:: flat.numel() // 2**14] = 1.0  # what the sample looks at
    flat[5:15] = torch.arange(2.0, 12.0)
    assert set(top_k(flat, 10).tolist()) == set(range(5, 15))
    flat[:] = 0
    assert len(set(top_k(flat, 10).tolist())) == 10


def test_not_a_number_counts_as_large():
    flat = normal(2 * SAMPLED_FROM)
    flat[7] = torch.nan
    assert 7 in top_k(flat, 3).tolist()
    assert 7 in at_least(flat, 1e9).tolist()


def test_each_part_has_its_own_largest():
    flat = torch.tensor([1.0, -9, 3, 100, 200, 300, 400, 0.1])
    assert set(top_k_of_each(flat, [3, 4, 0, 1], 0.5).tolist()) == {1, 2, 5, 6, 7}


@pytest.mark.parametrize(
    ("ratio", "numel", "count"), [(0.01, 100, 1), (0.01, 3, 1), (0.07, 100, 7), (1, 5, 5), (0.5, 0, 0)]
)
def test_count(ratio, numel, count):
    assert count_of(ratio, numel) == count


def test_top_k_is_a_contraction():
    """|x - C(x)|^2 <= (1 - k / n) |x|^2, with equality where all are as large."""
    for flat in (normal(1000), torch.ones(1000), torch.arange(1000.0)):
        for k in (1, 10, 500, 1000):
            rest = flat.clone()
            rest[top_k(flat, k)] = 0
            assert rest.square().sum() <= (1 - k / 1000) * flat.square().sum() * (1 + 1e-6)


def test_random_indices_are_unbiased():
    """Over 10,000 draws n / k times the kept elements average to the whole, to 5 standard deviations."""
    numel, k, draws = 20, 5, 10_000
    drawn = torch.stack([random_indices(numel, k, seed=1, step=step) for step in range(draws)])
    assert all(len(set(row)) == k for row in drawn[:100].tolist())
    frequency = torch.bincount(drawn.flatten(), minlength=numel) / draws
    assert (frequency * numel / k - 1).abs().max() < 5 * ((numel / k - 1) / draws) ** 0.5


def test_random_indices_are_those_of_a_step():
    assert torch.equal(random_indices(100, 9, 3, 7), random_indices(100, 9, 3, 7))
    assert not torch.equal(random_indices(100, 9, 3, 7), random_indices(100, 9, 3, 8))
    assert not torch.equal(random_indices(100, 9, 3, 7), random_indices(100, 9, 4, 7))
