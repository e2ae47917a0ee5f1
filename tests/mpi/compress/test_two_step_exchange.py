"""The 1-bit exchange with worker and server error, against its paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from verdicts import everyone, referee, same_on_all_ranks

import mpisgd
from mpisgd import config
from mpisgd.core.consistency import Operation
from mpisgd.methods.paper_kit import Vec
from mpisgd.methods.two_step.paper import TwoStep
from mpisgd.methods.two_step.two_step_exchange import Errors, TwoStepExchange
from mpisgd.tools.verification.paper_run import Definition, PaperRun
from mpisgd.tools.verification.papers import in_order

CPU = torch.device("cpu")
LENGTHS = [200, 1, 63, 136]


def given(rank: int, step: int, lengths: list[int] = LENGTHS) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(sum(lengths)) * 10.0 ** (rank - 1)


def exchange_of(group: mpisgd.Group, dtype: torch.dtype = torch.float64, lengths=LENGTHS) -> TwoStepExchange:
    return TwoStepExchange(lengths, dtype, CPU, group, Errors())


def by_name(vector: np.ndarray, lengths: list[int]) -> Vec:
    parts = torch.from_numpy(vector.copy()).split(lengths)
    return Vec({str(place): part for place, part in enumerate(parts)})


def joined(v: Vec) -> torch.Tensor:
    return torch.cat([v[name] for name in sorted(v)])


def kept(run: PaperRun, rank: int, lengths: list[int]) -> torch.Tensor:
    e = run.state.e[rank]
    return joined(e) if e else torch.zeros(sum(lengths), dtype=torch.float64)


def paper_run(size: int, lengths: list[int]) -> PaperRun:
    zeros = by_name(np.zeros(sum(lengths)), lengths)
    params = {rank: {n: torch.nn.Parameter(t) for n, t in zeros.items()} for rank in range(size)}
    still = {rank: torch.optim.SGD(mine.values(), lr=0.0) for rank, mine in params.items()}
    return PaperRun(Definition(TwoStep(), layout=in_order), params, still)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("lengths", [LENGTHS, [3], [64 * 5, 1]])
def test_it_equals_its_paper(group, lengths):
    if group.size == 1:  # of the paper such a group sends nothing, and nobody makes an exchange for it
        lengths = [1]
    run, ours = paper_run(group.size, lengths), exchange_of(group, lengths=lengths)
    for step in range(20):
        vectors = [given(rank, step, lengths) for rank in range(group.size)]
        values = torch.from_numpy(vectors[group.rank].copy())
        ours.average(values)
        right = run.step({rank: by_name(vector, lengths) for rank, vector in enumerate(vectors)})
        error = (values - joined(right[0])).abs().max().item()
        worker = (ours.worker_error - kept(run, group.rank, lengths)).abs().max().item()
        everyone(max(error, worker) < 1e-12, f"step {step}: {error} {worker}")


@pytest.mark.mpi(min_size=2)
def test_what_was_meant_arrives_or_stays(group):
    """The mean of all values so far is what all ranks got so far, the mean error and the servers'."""
    ours = exchange_of(group)
    meant, got = torch.zeros(2, sum(LENGTHS), dtype=torch.float64)
    for step in range(20):
        values = torch.from_numpy(given(group.rank, step))
        meant += values
        ours.average(values)
        got += values
    left = meant - ours.worker_error  # what this rank has sent
    mpisgd.all_reduce(left, mpisgd.ReduceOp.AVG, group)
    servers: list = [None] * group.size
    mpisgd.all_gather_object(servers, ours.server_error, group)
    error = (left - got - torch.cat(servers)).abs().max().item()
    everyone(error < 1e-12 * got.abs().max().item(), f"{error}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_its_bytes_are_its_formula(monkeypatch, dtype):
    """1/32 of float32, twice: there and back; and the magnitudes. Where the ranks have nothing but MPI."""
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    group = mpisgd.new_group()
    size, lengths = group.size, [64 * 20 * 12]
    ours = exchange_of(group, dtype, lengths)
    communicator = group.queue.communicator
    before = dict(communicator.given_bytes)
    group.queue.run(Operation("a bucket"), lambda: ours.average(torch.ones(sum(lengths), dtype=dtype)))
    given_bytes = {name: n - before.get(name, 0) for name, n in communicator.given_bytes.items()}
    sent = (size - 1) * (given_bytes["Alltoall"] // size + given_bytes["Allgather"])
    formula = TwoStepExchange.bytes_on_the_wire(lengths, dtype, size)
    signs = sum(lengths) // 8 // size
    everyone(sent == formula == 2 * (size - 1) * (signs + dtype.itemsize), f"{sent} {formula}")


@pytest.mark.mpi(min_size=2)
def test_values_that_are_not_finite_arrive_and_leave_no_trace(groups):
    group = groups["world"]
    ours, right = exchange_of(group), exchange_of(group)
    for step in range(3):
        values = torch.from_numpy(given(group.rank, step))
        right.average(values.clone())
        if step == 1:
            bad = values.clone()
            bad[7] = torch.inf if group.rank == 0 else 0.0
            kept = ours.worker_error.clone()
            ours.average(bad)
            everyone(not bad.isfinite().all(), "lost")
            everyone(group.rank != 0 or torch.equal(kept, ours.worker_error), "in the error")
        ours.average(values)
    everyone(bool(ours.worker_error.isfinite().all() and ours.server_error.isfinite().all()))


@pytest.mark.mpi(min_size=2)
def test_errors_are_saved_and_loaded_where_they_fit(groups):
    group = groups["world"]
    ours = exchange_of(group)
    ours.average(torch.from_numpy(given(group.rank, 0)))
    state = ours.state
    same, other = exchange_of(group), exchange_of(group)
    same.state.worker_error, same.state.server_error = state.worker_error.clone(), state.server_error.clone()
    other.state.worker_error, other.state.server_error = state.worker_error[1:], torch.zeros(9999)
    results = []
    for exchange in (ours, same, other):
        values = torch.from_numpy(given(group.rank, 1))
        exchange.average(values)
        results.append(values)
        same_on_all_ranks(values.tolist())
    everyone(torch.equal(results[0], results[1]), "resumed")
    everyone(not torch.equal(results[0], results[2]), "the errors make no difference")
    everyone(len(referee().allgather(0)) == group.size)
