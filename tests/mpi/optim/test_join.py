"""`join()` on ranks that MPI has started: drawn divisions of data, compared with one process bit for bit."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from uneven.division import METHODS, Division, drawn
from uneven.main import differing
from uneven.training import train
from verdicts import everyone, same_on_all_ranks

import mpisgd

SOME = 400  # seeds, among which each method is drawn for each number of ranks
several = pytest.mark.mpi(min_size=2)


def division_of(method: str) -> Division:
    """The first division of a method among so many ranks that leaves some of them without data."""
    size = min(4, mpisgd.size())
    for division in map(drawn, range(SOME)):
        if division.method == method and division.size == size and len({*map(len, division.batches)}) > 1:
            more = ((1,) * len(division.batches[0]),) * (mpisgd.size() - size)
            return dataclasses.replace(
                division, batches=division.batches + more, ranks_per_host=(mpisgd.size(),)
            )
    raise AssertionError(f"no division of {method} among {size} ranks")


@several
@pytest.mark.parametrize("method", METHODS)
def test_a_division_equals_one_process(method):
    division = division_of(method)
    why = differing(division, mpisgd.rank(), train(division))
    everyone(not why, why)


@several
def test_batch_norm_counts_the_rows_that_there_are():
    norm = mpisgd.SyncBatchNorm(2).double()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(norm.parameters(), lr=0.1))
    rows = torch.arange(12.0 * mpisgd.size(), dtype=torch.float64).reshape(mpisgd.size(), 6, 2)
    with optimizer.join():
        for step in range(1 + mpisgd.rank()):
            optimizer.zero_grad()
            norm(rows[mpisgd.rank()] + step).square().sum().backward()
            optimizer.step()
    plain = torch.nn.BatchNorm1d(2).double()
    with torch.no_grad():
        for step in range(mpisgd.size()):
            plain(torch.cat(list(rows[step:] + step)))
    everyone(torch.allclose(norm.running_mean, plain.running_mean), f"{norm.running_mean}")
    everyone(torch.allclose(norm.running_var, plain.running_var), f"{norm.running_var}")


@several
def test_a_scaler_makes_no_difference_where_the_last_windows_are_of_fewer_passes():
    """Gradients of full windows were reduced with the scale, and those of the others without it."""

    def trained(scale: float) -> torch.Tensor:
        layer = torch.nn.Linear(3, 1, bias=False).double()
        torch.nn.init.ones_(layer.weight)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.125)
        optimizer = mpisgd.DistributedOptimizer(optimizer, backward_passes_per_step=2)
        scaler = torch.amp.GradScaler("cpu", scale)
        num_batches = 3 + 2 * mpisgd.rank()
        with optimizer.join(follow=[scaler]):
            for batch in range(num_batches):
                inputs = torch.tensor([[mpisgd.rank() + 1.0, batch + 1.0, 2.0]], dtype=torch.float64)
                scaler.scale(layer(inputs).square().sum()).backward()
                if batch % 2 or batch == num_batches - 1:
                    scaler.step(optimizer)
                    scaler.update()
                    optimizer.zero_grad()
        return layer.weight.detach()

    once, scaled = trained(1.0), trained(1024.0)
    same_on_all_ranks(scaled.tolist())
    everyone(torch.equal(once, scaled), f"{scaled} is not {once}")


def in_barriers(number: int) -> None:
    with mpisgd.join(throw_on_early_termination=True):
        for _ in range(number):
            mpisgd.barrier()


@several
def test_early_termination_is_raised_on_all_ranks():
    with pytest.raises(mpisgd.DataExhausted):
        in_barriers(1 if mpisgd.rank() == 0 else 2)
    mpisgd.barrier()
