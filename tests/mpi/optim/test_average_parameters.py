"""`average_parameters`: the mean of the ranks' models, floating buffers included."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, raises_everywhere, same_on_all_ranks

import mpisgd
from mpisgd.errors import CollectiveMismatch


def model_of(rank: int) -> torch.nn.Module:
    """Of other values on every rank, in its parameters and in its buffers."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)).double()
    model(torch.randn(rank + 2, 4, dtype=torch.float64))
    for _ in range(rank):
        model(torch.randn(3, 4, dtype=torch.float64))
    return model


def test_parameters_and_floating_buffers_become_their_mean():
    size, rank = mpisgd.size(), mpisgd.rank()
    model = model_of(rank)
    mpisgd.average_parameters(model)
    states = [model_of(r).state_dict() for r in range(size)]
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            mean = torch.stack([state[name] for state in states]).mean(0)
            everyone(torch.allclose(value, mean, rtol=0, atol=1e-12), name)
            same_on_all_ranks(value.tolist())
        else:
            everyone(int(value) == rank + 1, name)


def test_pairs_of_a_group_are_averaged_in_it(groups):
    half = groups["half"]
    value = torch.full((5,), float(mpisgd.rank()))
    mpisgd.average_parameters([("x", value)], half)
    everyone(torch.allclose(value, torch.full((5,), sum(half.ranks) / half.size)))


@pytest.mark.mpi(min_size=2)
def test_other_shapes_are_told_on_every_rank():
    with raises_everywhere(CollectiveMismatch):
        mpisgd.average_parameters([("x", torch.ones(3 + mpisgd.rank()))])
