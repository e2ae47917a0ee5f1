"""Every method that keeps a state, on a model so small that a whole training takes milliseconds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from examples import example
from torch import Tensor, nn

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, LocalSGD, SparseLoCo, compress

Optimizer = torch.optim.Optimizer
Make = Callable[..., Optimizer]


class Net(nn.Module):
    """Parameters that are pulled to targets, which differ by rank, step and element."""

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(seed)
        shapes = ((6, 4), (5,), (3, 3))
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(shape, dtype=torch.float64, generator=draw)) for shape in shapes
        )

    def loss(self, rank: int, step: int) -> Tensor:
        weights = list(self.weights)
        pulls = zip(weights, targets(rank, step, *(w.shape for w in weights)), strict=True)
        return sum((w - t).square().sum() for w, t in pulls) / 2


@functools.lru_cache(1000)
def targets(rank: int, step: int, *shapes: torch.Size) -> list[Tensor]:
    """What a rank's parameters are pulled to in one step: the same in each test."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(shape, dtype=torch.float64, generator=draw) for shape in shapes]


def train(
    model: nn.Module, optimizer: Optimizer, first: int, last: int, group: mpisgd.Group | None = None
) -> None:
    """Take steps number `first` to `last`, `last` not included."""
    rank = mpisgd.rank() if group is None else group.rank
    for step in range(first, last):
        optimizer.zero_grad()
        model.loss(rank, step).backward()
        optimizer.step()


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def _wrapped(
    inner: Callable[[Any], Optimizer], model: nn.Module, *, group: mpisgd.Group | None = None, **options: Any
) -> Optimizer:
    return mpisgd.DistributedOptimizer(inner(model.parameters()), group=group, **options)


def _by_itself(
    kind: type[Optimizer], model: nn.Module, *, group: mpisgd.Group | None = None, **options: Any
) -> Optimizer:
    return kind(model.parameters(), lr=0.01, group=group, **options)


def sgd(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params: Any) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.02)


def plain(params: Any) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def method(inner: Callable[[Any], Optimizer], **options: Any) -> Make:
    return functools.partial(_wrapped, inner, **options)


TOP_K, POWER = compress.TopK(0.3), compress.PowerSGD(1)
SYNCHRONOUS: dict[str, Make] = {
    "AdamW": method(adam),
    "TopK": method(sgd, compression=TOP_K),
    "PowerSGD": method(adam, compression=POWER),
    "DeepGradient": method(plain, compression=compress.DeepGradient(0.2)),
    "RandomK": method(sgd, compression=compress.RandomK(0.3)),
    "ChunkTopK": method(sgd, compression=compress.ChunkTopK(keep=2, chunk=9)),
    "OneBit": method(sgd, compression=compress.OneBit()),
    "OneBit, two steps": method(sgd, compression=compress.OneBit(two_step=True)),
    "SignSGD": method(plain, compression=compress.SignSGD()),
    "Sharded": method(adam, strategy=mpisgd.Sharded(stage=2)),
    "shared parameters": method(adam, share_parameters=True),
}
# Whose ranks have models of their own.
OWN_MODELS: dict[str, Make] = {
    "LocalSGD": method(adam, strategy=LocalSGD(3, growth=1.5)),
    "LocalSGD, TopK, state": method(sgd, strategy=LocalSGD(3, average_state=True), compression=TOP_K),
    "LocalSGD, warm-up": method(sgd, strategy=LocalSGD(3, warmup_steps=6), compression=POWER),
    "DiLoCo": method(adam, strategy=DiLoCo(4, fragments=2, overlap_steps=1)),
    "DiLoCo, TopK": method(sgd, strategy=DiLoCo(3), compression=TOP_K),
    "DiLoCo, Adam": method(sgd, strategy=DiLoCo(3, torch.optim.Adam, {"lr": 0.1})),
    "SparseLoCo": method(adam, strategy=SparseLoCo(3, keep=2, chunk=9)),
    "ElasticAveraging": method(sgd, strategy=ElasticAveraging(every=2)),
    "ElasticAveraging, TopK": method(sgd, strategy=ElasticAveraging(every=2), compression=TOP_K),
    "Gossip": method(sgd, strategy=Gossip("ring", every=2)),
    "D-PSGD": method(sgd, strategy=Gossip("ring", style="combine_then_adapt")),
    "push-sum": method(sgd, strategy=Gossip("one_peer_exponential", style="push_sum")),
    "CHOCO": method(sgd, strategy=Gossip("ring", consensus_step=0.3), compression=TOP_K),
}


example_once = functools.lru_cache(example)  # it trains, on all ranks


def documented(model: nn.Module, *, group: mpisgd.Group | None = None) -> Optimizer:
    """By the strategy of docs/how-to/extending.md that declares a state."""
    strategy = example_once("state")["BlockMomentum"](steps=3)
    return mpisgd.DistributedOptimizer(sgd(model.parameters()), strategy=strategy, group=group)


OWN_MODELS["documented"] = documented
BY_THEMSELVES: dict[str, Make] = {
    "Dion": functools.partial(_by_itself, mpisgd.Dion, rank_fraction=0.5),
    "OneBitAdam": functools.partial(_by_itself, mpisgd.OneBitAdam, freeze_step=3),
    "OneBitLamb": functools.partial(_by_itself, mpisgd.OneBitLamb, freeze_step=3),
    "ZeroOneAdam": functools.partial(
        _by_itself, mpisgd.ZeroOneAdam, var_freeze_step=2, local_step_scaler=2, local_step_clipper=4
    ),
}
METHODS: dict[str, Make] = {**SYNCHRONOUS, **OWN_MODELS, **BY_THEMSELVES}
# What they keep is of a kind that another one keeps as well.
ALIKE = {
    *(
        "RandomK",
        "ChunkTopK",
        "OneBit",
        "SignSGD",
        "LocalSGD, warm-up",
        "DiLoCo, Adam",
        "ElasticAveraging, TopK",
    ),
    *("D-PSGD", "OneBitLamb"),
}


def marked(names: Iterable[str]) -> list[Any]:
    """As parameters of a test, those of which another one says as much marked long."""
    return [pytest.param(name, marks=pytest.mark.long) if name in ALIKE else name for name in names]
