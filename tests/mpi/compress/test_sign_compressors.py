"""`OneBit` (EF-signSGD) and `SignSGD`, and their bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from given_losses import begin, gradients, torch_backward, torch_parameters
from verdicts import everyone

import mpisgd
from mpisgd import ReduceOp, config
from mpisgd.compress import OneBit, SignSGD
from mpisgd.compress.compressor import BucketLayout
from mpisgd.core.consistency import Operation
from mpisgd.errors import InvalidArgument

LR = 0.05
METHODS = [OneBit(), OneBit(two_step=True), SignSGD(), SignSGD(majority_vote=False)]


@pytest.mark.mpi(min_size=2)
def test_with_error_feedback_the_mean_gradient_arrives_in_the_end():
    """A constant gradient: what arrived in N steps is N times it, but for one residual."""
    params = torch_parameters()
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=1.0), compression=OneBit())
    start = [param.detach().clone() for param in params]
    everyones = [gradients(begin(), rank, 0) for rank in range(mpisgd.size())]
    right = [sum(theirs) / mpisgd.size() for theirs in zip(*everyones, strict=True)]
    for _ in range(300):
        optimizer.zero_grad()
        here = gradients(begin(), mpisgd.rank(), 0)
        sum((param * torch.from_numpy(g)).sum() for param, g in zip(params, here, strict=True)).backward()
        optimizer.step()
    moved = [((a - b.detach()) / 300).numpy() for a, b in zip(start, params, strict=True)]
    off = max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(moved, right, strict=True))
    everyone(off < 0.2, f"{off}")


@pytest.mark.mpi(min_size=2)
def test_zeros_do_not_drift():
    param = torch.nn.Parameter(torch.zeros(9))
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), compression=SignSGD())
    for _ in range(4):
        optimizer.zero_grad()
        (0.0 * param).sum().backward()
        optimizer.step()
    everyone(param.tolist() == [0.0] * 9, f"{param}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("compression", METHODS, ids=repr)
def test_what_is_not_finite_reaches_all_ranks_and_is_forgotten(compression):
    param = torch.nn.Parameter(torch.zeros(300))
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD([param], lr=1.0), compression=compression)
    seen = []
    for factor in (1.0, torch.inf if mpisgd.rank() == 0 else 1.0, 1.0):
        optimizer.zero_grad()
        (factor * param).sum().backward()
        seen.append(bool(param.grad.isfinite().all()))
    everyone(seen == [True, False, True], f"{seen}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("numel", [0, 1, 64 * 60])
@pytest.mark.parametrize("compression", METHODS, ids=repr)
def test_bytes_on_the_wire_equal_the_formula(compression, numel, monkeypatch):
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    group = mpisgd.new_group()
    size = group.size
    reducer = compression.reducer(BucketLayout((torch.Size([numel]),), torch.float32))
    communicator = group.queue.communicator
    before = dict(communicator.given_bytes)
    bucket = torch.arange(numel, dtype=torch.float32) + group.rank
    group.queue.run(Operation("a bucket"), lambda: reducer.reduce(bucket, group, ReduceOp.AVG))
    given = {name: n - before.get(name, 0) for name, n in communicator.given_bytes.items()}
    sent = (size - 1) * (given.get("Alltoall", 0) // size + given["Allgather"])
    everyone(sent == reducer.bytes_on_the_wire(size), f"{given} {reducer.bytes_on_the_wire(size)}")
    if numel > 1 and compression == OneBit():
        everyone(sent == (size - 1) * (numel // 8 + 4))


@pytest.mark.mpi(min_size=2)
def test_the_residual_is_saved_and_belongs_to_its_rank():
    for compression in (OneBit(), OneBit(two_step=True)):
        results = []
        saved: dict = {}
        for resumed in (False, True, False):
            params = torch_parameters()
            optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(params, lr=LR), compression=compression)
            if resumed:
                optimizer.load_state_dict(saved)
            for step in range(0 if results else 3):
                optimizer.zero_grad()
                torch_backward(params, step)
            saved = saved or optimizer.state_dict()
            with torch.no_grad():
                [param.copy_(torch.from_numpy(x)) for param, x in zip(params, begin(), strict=True)]
            optimizer.zero_grad()
            torch_backward(params, 3)
            results.append(torch.cat([param.grad.flatten() for param in params]))
        everyone(torch.equal(results[0], results[1]), f"{compression}: resumed")
        everyone(not torch.equal(results[0], results[2]), f"{compression}: no difference")


def test_choices_are_checked():
    for make in (lambda: OneBit(two_step=3), lambda: SignSGD(majority_vote="yes")):
        with pytest.raises(InvalidArgument, match="expected True or False"):
            make()
