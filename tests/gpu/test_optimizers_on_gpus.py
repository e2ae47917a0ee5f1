"""Training on a GPU equals one process on the joined batch, by NCCL and through host memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_under_test import DEVICE
from harness import ADAM_DRIFT, check_equal_runs, gradients, mlp, pair, plain_step, share
from torch import nn
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd import Compression, ReduceOp
from mpisgd.job.lifecycle import current_job

STEPS = 6


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def test_sgd_equals_one_process_on_the_joined_batch(device):
    check_equal_runs(steps=STEPS)


@pytest.mark.parametrize(
    "options",
    [{"gradient_predivide_factor": 4.0}, {"op": ReduceOp.SUM, "by_rank": True}, {"bucket_cap_bytes": 64}],
    ids=str,
)
def test_options(device, options):
    check_equal_runs(steps=STEPS, tol=1e-10, **options)


def test_accumulation_and_a_partial_window(device):
    def body(run: Any, step: int) -> None:
        run.opt.zero_grad()
        for micro in range(3):
            if micro < 1:
                with run.no_sync():
                    run.backward(step, micro)
            else:
                run.backward(step, micro)
        run.synchronize()
        run.opt.step()

    check_equal_runs(body, steps=STEPS, tol=1e-10, backward_passes_per_step=4)


def test_compression_rounds_once(device):
    check_equal_runs(steps=STEPS, tol=0.02, compression=Compression.bf16)


class Lookup(nn.Module):
    """A sparse gradient, a dense one, and one that no rank ever has."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, sparse=True)
        self.head = nn.Linear(4, 2)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((inputs[:, 0].abs() * 10).long() % 7))


def test_sparse_and_missing_gradients(device):
    plain, ours = check_equal_runs(
        steps=STEPS, model=Lookup, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
    )
    everyone([g is None for g in gradients(ours.model)] == [g is None for g in gradients(plain.model)])


def test_what_is_averaged_by_hand(device):
    torch.manual_seed(3)
    model, whole = mlp().double().to(DEVICE), mlp().double().to(DEVICE)
    whole.load_state_dict(model.state_dict())
    inputs = torch.randn(12, 4, dtype=torch.float64).to(DEVICE)
    model(share(inputs, mpisgd.rank(), mpisgd.size())).square().mean().backward()
    whole(inputs).square().mean().backward()
    mpisgd.average_gradients(model)
    for mine, wanted in zip(gradients(model), gradients(whole), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-14)


def test_optimizer_state_of_one_rank_becomes_everyones(device):
    torch.manual_seed(mpisgd.rank())
    model = mlp().to(DEVICE)
    mpisgd.broadcast_parameters(model)
    opt = adam(model)
    if mpisgd.rank() == 0:
        model(torch.randn(3, 4, device=DEVICE)).sum().backward()
        opt.step()
        opt.zero_grad()
    mpisgd.broadcast_parameters(model)
    mpisgd.broadcast_optimizer_state(opt)
    same_on_all_ranks([state["exp_avg"].tolist() for state in opt.state.values()])
    check_equal_runs(plain_step, steps=STEPS, optimizer=adam, tol=ADAM_DRIFT)


@pytest.mark.processes
@pytest.mark.mpi(min_size=2)
def test_buckets_set_out_during_backward_where_the_gpu_sends_by_itself(device, simulated):
    """Through host memory they wait for its end, unless asked: the host would have to do it."""
    _, ours = pair(bucket_cap_bytes=64)
    sent: list[int] = []
    plain_step(ours, 0)

    def count(_: Any) -> None:
        sent.append(sum(len(inner.calls) for inner in device.opened))

    ours.model[0].weight.register_hook(count)
    before = sum(len(inner.calls) for inner in device.opened)
    plain_step(ours, 1)
    everyone((sent[0] > before) == (current_job().gpu == "nccl"), f"{before}, then {sent}")
