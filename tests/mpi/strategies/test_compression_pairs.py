"""Which compressions go with which strategies: what would train wrongly is refused on every rank."""

from __future__ import annotations

import pytest
import torch
from verdicts import everyone, raises_everywhere

import mpisgd
from mpisgd import DiLoCo, ElasticAveraging, Gossip, LocalSGD, ParameterServer, SparseLoCo, Synchronous
from mpisgd.compress import Auto, ChunkTopK, DeepGradient, OneBit, PerHost, PowerSGD, SignSGD, TopK
from mpisgd.errors import InvalidArgument

MOMENTUM = DeepGradient(0.1)
NOT_OF_PARAMETERS = [LocalSGD(4), DiLoCo(4), ElasticAveraging(), Gossip("ring", consensus_step=0.3)]


def wrap(strategy: mpisgd.Strategy, compression: mpisgd.Compressor, momentum: float = 0.0):
    params = [torch.nn.Parameter(torch.ones(4, 5))]
    sgd = torch.optim.SGD(params, lr=0.125, momentum=momentum)
    return params[0], mpisgd.DistributedOptimizer(sgd, strategy=strategy, compression=compression)


@pytest.mark.parametrize(
    ("strategy", "compression"),
    [
        # DiLoCo took a momentum, which then acted twice; and anything took one inside of PerHost or Auto.
        *((strategy, MOMENTUM) for strategy in NOT_OF_PARAMETERS),
        *((strategy, PerHost(MOMENTUM)) for strategy in NOT_OF_PARAMETERS),
        *((strategy, Auto((TopK(0.1), PerHost(MOMENTUM)))) for strategy in NOT_OF_PARAMETERS),
        # Changes of parameters became 1 and -1.
        (LocalSGD(4), SignSGD()),
        (ElasticAveraging(), SignSGD(majority_vote=False)),
        (LocalSGD(4), PerHost(SignSGD())),
        (ElasticAveraging(), Auto((OneBit(), SignSGD()))),
        (Gossip("ring", consensus_step=0.3), SignSGD()),
        (ParameterServer("async"), TopK(0.1)),
        # The centre would drift from what fades in the residual.
        (ElasticAveraging(), ChunkTopK()),
        (ElasticAveraging(), PerHost(ChunkTopK())),
        (ElasticAveraging(), Auto((TopK(0.1), ChunkTopK()))),
        (SparseLoCo(4), TopK(0.1)),
    ],
    ids=repr,
)
def test_what_does_not_go_together_is_refused(strategy, compression):
    with raises_everywhere(InvalidArgument) as caught:
        wrap(strategy, compression)
    everyone("compression=" in caught.text, caught.text)


@pytest.mark.parametrize("compression", [MOMENTUM, PerHost(MOMENTUM), Auto((TopK(0.1), MOMENTUM))], ids=repr)
def test_a_second_momentum_is_refused(compression):
    with raises_everywhere(InvalidArgument) as caught:
        wrap(Synchronous(), compression, momentum=0.9)
    everyone("has a momentum, and so has the optimizer" in caught.text, caught.text)


@pytest.mark.parametrize(
    ("strategy", "compression"),
    [
        (Synchronous(), SignSGD()),
        (Synchronous(), PerHost(MOMENTUM)),
        (DiLoCo(1), SignSGD()),  # outer gradients may be signs, with a learning rate for them
        (DiLoCo(1), PowerSGD(1)),
        (LocalSGD(1), OneBit()),
        (ElasticAveraging(), PerHost(TopK(0.5))),
        (ElasticAveraging(), ChunkTopK(error_decay=1)),
    ],
    ids=repr,
)
def test_what_goes_together_trains(strategy, compression):
    param, optimizer = wrap(strategy, compression)
    param.grad = torch.full_like(param, mpisgd.rank() + 1.0)
    optimizer.step()
    everyone(bool((param != 1).any()) and bool(param.isfinite().all()), f"{param}")
