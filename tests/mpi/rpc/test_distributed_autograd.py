"""Gradients and steps of a model whose parts are on different ranks equal those of the whole model here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from verdicts import everyone, referee

import mpisgd
from mpisgd import rpc

TOLERANCE = 1e-12


def part(seed: int) -> nn.Module:
    """Return a part of the model: the same wherever it is made, and whatever other threads draw meanwhile."""
    draw = torch.Generator().manual_seed(seed)
    made = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)).double()
    for param in made.parameters():
        param.data = 0.5 * torch.randn(param.shape, generator=draw, dtype=torch.float64)
    return made


def references(module: rpc.RRef) -> list[rpc.RRef]:
    return [rpc.RRef(param) for param in module.local_value().parameters()]


def gradients(context: int, module: rpc.RRef) -> list[Tensor]:
    found = rpc.dist_autograd.get_gradients(context)
    return [found[param] for param in module.local_value().parameters()]


def values(module: rpc.RRef) -> list[Tensor]:
    return [param.detach().clone() for param in module.local_value().parameters()]


def on_owner(what, module: rpc.RRef, *args):
    return rpc.rpc_sync(module.owner(), what, (*args, module))


class Chain:
    """Parts on all ranks, one after the other, of which this rank has the first; the loss comes back here."""

    def __init__(self) -> None:
        rank, size = mpisgd.rank(), mpisgd.size()
        self.seeds = [10 * rank + i for i in range(max(2, size))]
        self.parts = [rpc.remote((rank + i) % size, part, (seed,)) for i, seed in enumerate(self.seeds)]

    def __call__(self, x: Tensor) -> Tensor:
        for module in self.parts:
            x = x + module.rpc_sync().forward(x)
        return x.square().mean()


def here(seeds: list[int]) -> tuple[nn.ModuleList, torch.optim.Optimizer]:
    """The same model on this rank alone."""
    model = nn.ModuleList([part(seed) for seed in seeds])
    return model, torch.optim.NAdam(model.parameters(), lr=0.1)  # torch compiles others, for seconds


def loss_here(model: nn.ModuleList, x: Tensor) -> Tensor:
    for module in model:
        x = x + module(x)
    return x.square().mean()


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@pytest.fixture
def batches(workers) -> list[Tensor]:
    draw = torch.Generator().manual_seed(mpisgd.rank())
    yield [torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(3)]
    referee().barrier()


def test_gradients_equal_those_of_the_whole_model(batches):
    chain = Chain()
    model, _ = here(chain.seeds)
    with rpc.dist_autograd.context() as context:
        loss = chain(batches[0])
        rpc.dist_autograd.backward(context, [loss])
        found = [on_owner(gradients, module, context) for module in chain.parts]
    expected = loss_here(model, batches[0])
    expected.backward()
    everyone(abs(loss.item() - expected.item()) < TOLERANCE)
    for ours, theirs in zip(found, model, strict=True):
        theirs_grads = [param.grad for param in theirs.parameters()]
        assert all(float(grad.abs().max()) > 1e-6 for grad in theirs_grads)
        everyone(distance(ours, theirs_grads) < TOLERANCE, f"{distance(ours, theirs_grads)}")


def test_steps_of_the_distributed_optimizer_equal_those_of_the_whole_model(batches):
    chain = Chain()
    model, optimizer = here(chain.seeds)
    params = [reference for module in chain.parts for reference in on_owner(references, module)]
    distributed = rpc.DistributedOptimizer(torch.optim.NAdam, params, lr=0.1)
    for x in batches:
        with rpc.dist_autograd.context() as context:
            rpc.dist_autograd.backward(context, [chain(x)])
            distributed.step(context)
        optimizer.zero_grad()
        loss_here(model, x).backward()
        optimizer.step()
    for module, theirs in zip(chain.parts, model, strict=True):
        apart = distance(on_owner(values, module), list(theirs.parameters()))
        everyone(apart < TOLERANCE, f"{apart}")
