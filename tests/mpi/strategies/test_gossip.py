"""`Gossip`, whose styles are their papers in tests/unit/methods: special cases, bytes, and what is saved."""

from __future__ import annotations

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from verdicts import everyone, same_on_all_ranks

import mpisgd
from mpisgd import Compression, Gossip, config

LR, NUM_STEPS = 0.1, 20


def fresh_model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def loss_of(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    """On a batch of this rank and step."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return (model(torch.randn(4, 6, dtype=torch.float64, generator=generator)) - rank).square().mean()


def gradient(x: torch.Tensor, rank: int, step: int) -> torch.Tensor:
    """Of the loss of a rank at the flat parameters `x`."""
    model = fresh_model()
    vector_to_parameters(x, model.parameters())
    loss_of(model, rank, step).backward()
    return parameters_to_vector(param.grad for param in model.parameters())


def start(size: int) -> torch.Tensor:
    """[size, parameters]: ranks begin apart from each other."""
    x = parameters_to_vector(fresh_model().parameters()).detach()
    return torch.stack([x + 0.1 * torch.sin(torch.arange(len(x)) + rank) for rank in range(size)])


def directed(size: int, _: int) -> torch.Tensor:
    """Rank 0 keeps a third and passes on two; the others pass on a half. Columns sum to 1, rows do not."""
    w = torch.zeros(size, size, dtype=torch.float64)
    for j in range(size):
        kept = 1 / 3 if j == 0 else 1 / 2
        w[j, j] += kept
        w[(j + 1) % size, j] += (1 - kept) / 2
        w[(j + 2) % size, j] += (1 - kept) / 2
    return w


def trained(strategy: Gossip | None, num_steps: int = NUM_STEPS, **options) -> torch.Tensor:
    """This rank's parameters after so many steps of SGD."""
    model = fresh_model()
    vector_to_parameters(start(mpisgd.size())[mpisgd.rank()], model.parameters())
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=LR), strategy=strategy, **options
    )
    for step in range(num_steps):
        optimizer.zero_grad()
        loss_of(model, mpisgd.rank(), step).backward()
        optimizer.step()
    return parameters_to_vector(model.parameters()).detach()


def test_a_complete_graph_is_synchronous_sgd():
    """From equal starts the mean of the updated models is the model updated by the mean gradient."""
    models = [fresh_model(), fresh_model()]
    strategies = [Gossip("complete"), mpisgd.Synchronous()]
    for model, strategy in zip(models, strategies, strict=True):
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=LR), strategy=strategy)
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            loss_of(model, mpisgd.rank(), step).backward()
            optimizer.step()
    gossip, synchronous = (parameters_to_vector(model.parameters()).detach() for model in models)
    everyone(torch.allclose(gossip, synchronous, rtol=0, atol=1e-12), f"{gossip - synchronous}")
    same_on_all_ranks(gossip.tolist())


def test_push_sum_without_gradients_finds_the_exact_mean():
    """Of any column-stochastic matrix: the biased models go elsewhere, the ratio does not."""
    size, rank = mpisgd.size(), mpisgd.rank()
    param = torch.nn.Parameter(start(size)[rank].clone())
    optimizer = mpisgd.DistributedOptimizer(
        torch.optim.SGD([param], lr=0.0), strategy=Gossip(directed(size, 0), style="push_sum")
    )
    for _ in range(100):
        param.grad = torch.zeros_like(param)
        optimizer.step()
    everyone(torch.allclose(param.detach(), start(size).mean(0), rtol=0, atol=1e-12))
    weights = [None] * size
    mpisgd.all_gather_object(weights, optimizer.state_dict()["mpisgd"]["own"]["weight"])
    assert sum(weights) == pytest.approx(size, abs=1e-12)
    assert size == 1 or max(weights) - min(weights) > 0.1


@pytest.mark.mpi(min_size=2)
def test_casts_halve_the_bytes_and_keep_the_mean(monkeypatch):
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    size, group = mpisgd.size(), mpisgd.new_group()
    sent = {}
    for compression in (Compression.none, Compression.bf16):
        before = group.queue.communicator.sent_bytes
        mine = trained(Gossip("ring"), 1, compression=compression, group=group)
        sent[compression] = group.queue.communicator.sent_bytes - before
    num_neighbours = min(2, size - 1)
    everyone(sent[Compression.none] - sent[Compression.bf16] == num_neighbours * mine.numel() * 6, f"{sent}")
    total = mine.clone()
    mpisgd.all_reduce(total)
    grads = torch.stack([gradient(x, rank, 0) for rank, x in enumerate(start(size))])
    everyone(torch.allclose(total, (start(size) - LR * grads).sum(0), rtol=0, atol=1e-12))


@pytest.mark.mpi(min_size=3)
def test_a_rank_sends_to_its_neighbours_only(monkeypatch):
    """On a star, everyone but the first rank sends its parameters once per step."""
    monkeypatch.setattr(config, "shared_memory", lambda: False)
    group = mpisgd.new_group()
    short, long = [], []
    for steps, bytes_of in ((2, short), (5, long)):
        before = group.queue.communicator.sent_bytes
        numel = trained(Gossip("star"), steps, group=group).numel()
        bytes_of.append(group.queue.communicator.sent_bytes - before)
    num_neighbours = group.size - 1 if group.rank == 0 else 1
    everyone(long[0] - short[0] == 3 * 8 * numel * num_neighbours, f"{short}, {long}")
