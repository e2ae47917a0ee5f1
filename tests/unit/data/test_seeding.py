"""`mpisgd.seed`: other numbers on each rank, the same ones in the next run, also in DataLoader workers."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import mpisgd
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks


def drawn(value, **options):
    """What each rank draws after seeding; no other thread draws in between."""

    def program():
        mpisgd.seed(value, **options)
        return torch.rand(1).item(), random.random(), float(np.random.rand()), torch.initial_seed()

    return run_ranks(3, program)


def test_ranks_draw_other_numbers_and_the_same_in_the_next_run():
    first = drawn(5)
    assert first == drawn(5)
    assert all(len(set(column)) == 3 for column in zip(*first, strict=True))
    assert not set(first) & set(drawn(6))


def test_all_ranks_may_draw_the_same():
    found = drawn(5, same=True)
    assert len(set(found)) == 1
    assert found[0] not in drawn(5)


class Draws(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.rand(1).item(), float(np.random.rand())


def test_workers_of_a_dataloader_take_their_seeds_from_it():
    """torch counts the seeds of workers on from the rank's, so ranks must not have neighbouring ones."""

    def of_workers():
        seed = mpisgd.seed(5)
        return seed, [numbers.tolist() for numbers in next(iter(DataLoader(Draws(), 4, num_workers=1)))]

    (seed, first), (other, second) = (run_ranks(1, of_workers)[0] for _ in range(2))
    assert seed == other
    assert first == second
    seeds = run_ranks(4, lambda: mpisgd.seed(5))
    assert min(abs(a - b) for a, b in itertools.combinations(seeds, 2)) > 10**6


@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_other_seeds_are_refused(value):
    with pytest.raises(RankFailed, match="seed: value="):
        run_ranks(1, lambda: mpisgd.seed(value))
