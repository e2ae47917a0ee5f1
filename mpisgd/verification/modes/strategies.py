"""Strategies whose ranks have models of their own: equal to their definition, simulated in one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import mpisgd
from mpisgd.job.rank_info import topology
from mpisgd.verification.mode import Mode, between_orders
from mpisgd.verification.modes.synchronous import native, sgd
from mpisgd.verification.problem import Problem
from mpisgd.verification.sabotage import Sabotage
from mpisgd.verification.serial.compressors import largest
from mpisgd.verification.serial.gossip import choco, gossip, push_sum
from mpisgd.verification.serial.strategies import diloco, elastic_averaging, local_sgd
from mpisgd.verification.trainee import Trainee

__all__ = ["STRATEGIES"]

EVERY = 2
OUTER = (0.7, 0.9)  # learning rate and momentum


def ring(size: int) -> Tensor:
    """Return the weights of Metropolis and Hastings on a ring, [size, size]."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        neighbours = {(rank - 1) % size, (rank + 1) % size} - {rank}
        for other in neighbours:
            matrix[rank, other] = 1 / (len(neighbours) + 1)
        matrix[rank, rank] = 1 - matrix[rank].sum()
    return matrix


def directed(size: int) -> Tensor:
    """Return weights on a ring one way, [size, size]: rank 0 keeps less, so rows do not sum to 1."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        kept = 0.25 if rank == 0 else 0.5
        matrix[rank, rank] += kept
        matrix[(rank + 1) % size, rank] += 1 - kept
    return matrix


def pushing(trainee: Trainee) -> Tensor:
    """Train with push-sum, whose matrix is one for as many ranks as there are."""
    size = 1 if trainee.sabotage is Sabotage.NO_COMMUNICATION else trainee.problem.size
    strategy = mpisgd.Gossip(directed(size).tolist(), style="push_sum")
    return native(sgd, strategy=strategy)(trainee)


def _mode(
    name: str,
    strategy: mpisgd.Strategy,
    simulate: Callable[[Problem, int], Tensor],
    *,
    compression: mpisgd.Compressor = mpisgd.Compression.none,
    **options: Any,
) -> Mode:
    train = native(sgd, strategy=strategy, compression=compression)
    return Mode(name, "strategies", train, between_orders(simulate), (2, 2**31), **options)


STRATEGIES = (
    _mode(
        "LocalSGD(2)",
        mpisgd.LocalSGD(EVERY),
        lambda problem, order: local_sgd(problem, sgd, EVERY, order),
    ),
    _mode(
        'LocalSGD(hierarchy={"host": 1, "job": 3})',
        mpisgd.LocalSGD(hierarchy={"host": 1, "job": 3}),
        lambda problem, order: local_sgd(problem, sgd, 3, order, topology().nodes),
        hosts=2,
    ),
    _mode(
        "DiLoCo(2)",
        mpisgd.DiLoCo(EVERY),
        lambda problem, order: diloco(problem, sgd, EVERY, OUTER, order),
    ),
    _mode(
        "DiLoCo(3, fragments=2, overlap_steps=1)",
        mpisgd.DiLoCo(3, fragments=2, overlap_steps=1, overlap_alpha=0.25),
        lambda problem, order: diloco(
            problem, sgd, 3, OUTER, order, fragments=2, overlap_steps=1, alpha=0.25
        ),
    ),
    _mode(
        "ElasticAveraging(every=2)",
        mpisgd.ElasticAveraging(every=EVERY),
        lambda problem, order: elastic_averaging(problem, sgd, EVERY, 0.9 / problem.size, order),
    ),
    _mode(
        'Gossip("ring")',
        mpisgd.Gossip("ring"),
        lambda problem, order: gossip(problem, sgd, ring(problem.size), order),
    ),
    _mode(
        'Gossip("ring", "combine_then_adapt")',
        mpisgd.Gossip("ring", style="combine_then_adapt"),
        lambda problem, order: gossip(problem, sgd, ring(problem.size), order, adapts_first=False),
        quick=False,
    ),
    Mode(
        'Gossip(matrix, "push_sum")',
        "strategies",
        pushing,
        between_orders(lambda problem, order: push_sum(problem, sgd, directed(problem.size), order)),
        (2, 2**31),
    ),
    _mode(
        'Gossip("ring", consensus_step=0.3), TopK(ratio=0.2)',
        mpisgd.Gossip("ring", consensus_step=0.3),
        lambda problem, order: choco(
            problem, sgd, ring(problem.size), order, send=largest(0.2), consensus_step=0.3
        ),
        compression=mpisgd.compress.TopK(ratio=0.2),
    ),
    _mode(
        'Gossip("complete")',
        mpisgd.Gossip("complete"),
        lambda problem, order: local_sgd(problem, sgd, 1, order),
        quick=False,
    ),
)
