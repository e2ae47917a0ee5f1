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
from mpisgd.verification.serial_strategies import diloco, elastic_averaging, gossip, local_sgd

__all__ = ["STRATEGIES"]

EVERY = 2


def ring(size: int) -> Tensor:
    """Return the weights of Metropolis and Hastings on a ring, [size, size]."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        neighbours = {(rank - 1) % size, (rank + 1) % size} - {rank}
        for other in neighbours:
            matrix[rank, other] = 1 / (len(neighbours) + 1)
        matrix[rank, rank] = 1 - matrix[rank].sum()
    return matrix


def _mode(
    name: str, strategy: mpisgd.Strategy, simulate: Callable[[Problem, int], Tensor], **options: Any
) -> Mode:
    return Mode(name, "strategies", native(sgd, strategy=strategy), between_orders(simulate), **options)


STRATEGIES = (
    _mode(
        "LocalSGD(2)",
        mpisgd.LocalSGD(EVERY),
        lambda problem, order: local_sgd(problem, sgd, EVERY, order),
        sizes=(2, 2**31),
    ),
    _mode(
        'LocalSGD(hierarchy={"host": 1, "job": 3})',
        mpisgd.LocalSGD(hierarchy={"host": 1, "job": 3}),
        lambda problem, order: local_sgd(problem, sgd, 3, order, topology().nodes),
        sizes=(2, 2**31),
        hosts=2,
    ),
    _mode(
        "DiLoCo(2)",
        mpisgd.DiLoCo(EVERY),
        lambda problem, order: diloco(problem, sgd, EVERY, 0.7, 0.9, order),
        sizes=(2, 2**31),
    ),
    _mode(
        "ElasticAveraging(every=2)",
        mpisgd.ElasticAveraging(every=EVERY),
        lambda problem, order: elastic_averaging(problem, sgd, EVERY, 0.9 / problem.size, order),
        sizes=(2, 2**31),
    ),
    _mode(
        'Gossip("ring")',
        mpisgd.Gossip("ring"),
        lambda problem, order: gossip(problem, sgd, ring(problem.size), order),
        sizes=(2, 2**31),
    ),
    _mode(
        'Gossip("ring", "combine_then_adapt")',
        mpisgd.Gossip("ring", style="combine_then_adapt"),
        lambda problem, order: gossip(problem, sgd, ring(problem.size), order, adapts_first=False),
        sizes=(2, 2**31),
        quick=False,
    ),
    _mode(
        'Gossip("complete")',
        mpisgd.Gossip("complete"),
        lambda problem, order: local_sgd(problem, sgd, 1, order),
        sizes=(2, 2**31),
        quick=False,
    ),
)
