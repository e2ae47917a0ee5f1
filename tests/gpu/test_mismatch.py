"""Ranks that do different things by NCCL find out late, and keep no gradient that is wrong."""

from __future__ import annotations

import pytest
import torch
from gpu_under_test import DEVICE
from torch import nn
from verdicts import everyone, raises_everywhere

import mpisgd


@pytest.mark.mpi(min_size=2)
def test_gradients_after_a_mismatch_are_unreduced_or_gone(simulated, expected_way):
    if expected_way != "nccl":
        pytest.skip("through host memory the ranks compare before they send")
    group = mpisgd.new_group()
    model = nn.Linear(3, 2).to(DEVICE)
    mpisgd.broadcast_parameters(model, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = mpisgd.DistributedOptimizer(optimizer, group=group, gradient_predivide_factor=4.0)
    inputs = torch.ones(2, 3, device=DEVICE)
    for _ in range(2):  # from now on gradients lie where they are reduced
        optimizer.zero_grad(set_to_none=False)
        model(inputs).sum().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    if mpisgd.rank() == 0:
        simulated.opened[-1].allreduce = lambda *arguments: None  # it would meet the others' gradients
        mpisgd.all_reduce(torch.ones(1, device=DEVICE), group=group)
        del simulated.opened[-1].allreduce
    with raises_everywhere(mpisgd.CollectiveMismatch):
        model(inputs).sum().backward()
        optimizer.step()
    wrong = [p.grad for p in model.parameters() if p.grad is not None and (p.grad != 2.0).any()]
    everyone(not wrong, f"{wrong}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("differs", ["on the CPU", "on the GPU"])
def test_what_all_ranks_have_launched_before_a_mismatch_is_done(expected_way, differs):
    # NCCL was ended at once, and what it had in flight was undefined: parameters after their broadcast.
    group, device = mpisgd.new_group(), DEVICE if differs == "on the GPU" else "cpu"
    values = torch.arange(6.0, device=DEVICE) + mpisgd.rank()
    mpisgd.all_reduce(torch.ones(3, device=DEVICE), group=group)
    mpisgd.broadcast(values, 1, group=group)
    with raises_everywhere(mpisgd.CollectiveMismatch):
        mpisgd.all_reduce(torch.ones(2 + mpisgd.rank(), device=device), group=group)
        mpisgd.barrier(group)
    everyone(differs == "on the GPU" or values.tolist() == [1.0 + i for i in range(6)], f"{values}")
    mpisgd.all_reduce(values, group=group)
    everyone(bool(values.isfinite().all()))
