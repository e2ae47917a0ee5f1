"""Strategies whose ranks have models of their own: equal to their papers, with all ranks in one process."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.job.lifecycle import world
from mpisgd.job.rank_info import topology
from mpisgd.tools.verification.mode import Mode, between_orders
from mpisgd.tools.verification.modes.synchronous import native, sgd
from mpisgd.tools.verification.papers import paper_of
from mpisgd.tools.verification.problem import Problem
from mpisgd.tools.verification.programs.serial_definition import has_codes
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import trajectory

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


def directed(size: int) -> Tensor:
    """Return weights on a ring one way, [size, size]: rank 0 keeps less, so rows do not sum to 1."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    for rank in range(size):
        kept = 0.25 if rank == 0 else 0.5
        matrix[rank, rank] += kept
        matrix[(rank + 1) % size, rank] += 1 - kept
    return matrix


def by_paper(
    strategy_of: Callable[[int], mpisgd.Strategy],
    compression: mpisgd.Compressor = mpisgd.Compression.none,
    make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer] = sgd,
) -> Callable[[Problem, int], Tensor]:
    """Return the training by the paper of a strategy, which is made of the number of ranks."""

    def simulate(problem: Problem, order: int) -> Tensor:
        lengths = [(name, param.nbytes) for name, param in problem.model().named_parameters()]
        strategy = strategy_of(problem.size)
        definition = paper_of(strategy, compression, size=problem.size, lengths=lengths)
        return trajectory(problem, make, definition, order, hosts=_hosts(strategy))

    return simulate


def _hosts(strategy: mpisgd.Strategy) -> Sequence[Sequence[int]]:
    """Return the ranks of each host; where sums of hosts are coded, a rank without shared memory is one."""
    if has_codes(strategy) and not world().shares_memory:
        return [[rank] for rank in range(mpisgd.size())]
    return topology().nodes


def pushing(trainer: Trainer) -> Tensor:
    """Train with push-sum, whose matrix is one for as many ranks as there are."""
    size = 1 if trainer.sabotage is Sabotage.NO_COMMUNICATION else trainer.problem.size
    return native(sgd, strategy=push_sum(size))(trainer)


def push_sum(size: int) -> mpisgd.Strategy:
    """Return push-sum of so many ranks."""
    return mpisgd.Gossip(directed(size).tolist(), style="push_sum")


def _mode(
    name: str,
    strategy: mpisgd.Strategy,
    *,
    compression: mpisgd.Compressor = mpisgd.Compression.none,
    definition: Callable[[int], mpisgd.Strategy] | None = None,
    **options: Any,
) -> Mode:
    train = native(sgd, strategy=strategy, compression=compression)
    reference = between_orders(by_paper(definition or (lambda _: strategy), compression))
    return Mode(name, "strategies", train, reference, (2, 2**31), **options)


def _on_ring(name: str, strategy: mpisgd.Gossip, **options: Any) -> Mode:
    """The paper has the weights of a ring from here."""

    def definition(size: int) -> mpisgd.Gossip:
        return dataclasses.replace(strategy, topology=ring(size).tolist())

    return _mode(name, strategy, definition=definition, **options)


STRATEGIES = (
    _mode(
        "Sharded(2, gradients=BlockQuantized(bits=4))",
        mpisgd.Sharded(2, gradients=mpisgd.compress.BlockQuantized(bits=4)),
        hosts=2,
    ),
    _mode("LocalSGD(2)", mpisgd.LocalSGD(EVERY)),
    _mode(
        'LocalSGD(hierarchy={"host": 1, "job": 3})',
        mpisgd.LocalSGD(hierarchy={"host": 1, "job": 3}),
        hosts=2,
    ),
    _mode(
        "LocalSGD(2), TopK(ratio=0.2)",
        mpisgd.LocalSGD(EVERY),
        compression=mpisgd.compress.TopK(ratio=0.2),
        quick=False,
    ),
    _mode("DiLoCo(2)", mpisgd.DiLoCo(EVERY)),
    _mode(
        "DiLoCo(3, fragments=2, overlap_steps=1)",
        mpisgd.DiLoCo(3, fragments=2, overlap_steps=1, overlap_alpha=0.25),
    ),
    _mode('DiLoCo(2, quorum="all")', mpisgd.DiLoCo(EVERY, quorum="all"), quick=False),
    _mode("SparseLoCo(2, keep=2, chunk=10)", mpisgd.SparseLoCo(EVERY, keep=2, chunk=10), quick=False),
    _mode("ElasticAveraging(every=2)", mpisgd.ElasticAveraging(every=EVERY)),
    _on_ring('Gossip("ring")', mpisgd.Gossip("ring")),
    _on_ring(
        'Gossip("ring", "combine_then_adapt")',
        mpisgd.Gossip("ring", style="combine_then_adapt"),
        quick=False,
    ),
    Mode(
        'Gossip(matrix, "push_sum")',
        "strategies",
        pushing,
        between_orders(by_paper(push_sum)),
        (2, 2**31),
    ),
    _on_ring(
        'Gossip("ring", consensus_step=0.3), TopK(ratio=0.2)',
        mpisgd.Gossip("ring", consensus_step=0.3),
        compression=mpisgd.compress.TopK(ratio=0.2),
    ),
    _mode(
        'Gossip("complete")',
        mpisgd.Gossip("complete"),
        definition=lambda _: mpisgd.LocalSGD(1),
        quick=False,
    ),
)
