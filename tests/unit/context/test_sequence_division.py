"""Parts of sequences: nothing lost, nothing twice, and with a causal mask as much for all ranks."""

from __future__ import annotations

import pytest
import torch

from mpisgd.context.division import block_of, own_part, positions


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_place_is_one_ranks(size):
    length = 6 * size
    found = [place for rank in range(size) for place in positions(length, rank, size)]
    assert sorted(found) == list(range(length))
    assert all(positions(length, rank, size) == sorted(positions(length, rank, size)) for rank in range(size))


def test_a_part_is_cut_along_its_dimension():
    tensor = torch.arange(48).view(2, 8, 3)
    assert torch.equal(own_part(tensor, 1, 1, 2), tensor[:, [2, 3, 4, 5]])
    assert own_part(tensor, 1, 0, 1) is tensor


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_each_query_sees_each_key_once_that_it_may_see(size, is_causal):
    chunk = 3
    length = 2 * size * chunk
    seen = torch.zeros(length, length, dtype=torch.int64)
    counts = torch.zeros(size, size, dtype=torch.int64)  # pairs by rank and source
    for rank in range(size):
        for source in range(size):
            block = block_of(rank, source, 2 * chunk, 2 * chunk, is_causal)
            rows = torch.tensor(positions(length, rank, size))[block.rows]
            columns = torch.tensor(positions(length, source, size))[block.columns]
            pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
            pairs = pairs.tril() if block.is_causal else pairs
            seen[rows.unsqueeze(1), columns] += pairs
            counts[rank, source] = pairs.sum()
    every = torch.ones(length, length, dtype=torch.int64)
    assert torch.equal(seen, every.tril() if is_causal else every)
    for step in range(size):  # in each of them all ranks have as much to do
        assert len({int(counts[rank, (rank - step) % size]) for rank in range(size)}) == 1
