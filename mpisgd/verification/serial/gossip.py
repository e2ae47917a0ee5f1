"""Gossip by its papers, with all ranks in one process.

W is the mixing matrix, [size, size] by rows: what the model of rank j counts in that of rank i. Every
function returns the parameters of each rank after each step, [size, steps, numel].
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mpisgd.verification.problem import Problem
from mpisgd.verification.serial.training import MakeOptimizer, Ranks, mean_in_order

__all__ = ["choco", "gossip", "push_sum"]


def gossip(
    problem: Problem,
    make_optimizer: MakeOptimizer,
    matrix: Tensor,
    order: int,
    *,
    adapts_first: bool = True,
) -> Tensor:
    """X <- W (X - update) in every step, or W X - update (Lian 2017)."""
    ranks = Ranks(problem, make_optimizer)
    for step in range(problem.steps):
        begun = ranks.parameters()
        ranks.step(step)
        done = ranks.parameters()
        for rank, mixed in enumerate(_mixed(matrix, done if adapts_first else begun, order)):
            ranks.set(rank, mixed if adapts_first else mixed + (done[rank] - begun[rank]))
        ranks.note()
    return ranks.trajectory()


def push_sum(problem: Problem, make_optimizer: MakeOptimizer, matrix: Tensor, order: int) -> Tensor:
    """X <- W (X - update at Z), w <- W w, Z = X / w: only W's columns sum to 1 (SGP, Assran 2019)."""
    ranks = Ranks(problem, make_optimizer)
    x, w = ranks.parameters(), torch.ones(problem.size, dtype=torch.float64)
    for step in range(problem.steps):
        begun = ranks.parameters()
        ranks.step(step)
        moved = [x[rank] + (done - begun[rank]) for rank, done in enumerate(ranks.parameters())]
        x, w = _mixed(matrix, moved, order), matrix @ w
        for rank, values in enumerate(x):
            ranks.set(rank, values / float(w[rank]))
        ranks.note()
    return ranks.trajectory()


def choco(
    problem: Problem,
    make_optimizer: MakeOptimizer,
    matrix: Tensor,
    order: int,
    *,
    send: Callable[[Tensor], Tensor],
    consensus_step: float,
) -> Tensor:
    """Ranks send what `send` leaves of X - H, add it to H, and mix H (CHOCO-SGD, Koloskova 2019).

    H[j] is the copy of X[j] that its neighbours have; X[i] <- X[i] + c sum over j of W[i, j] (H[j] - H[i]).
    """
    ranks = Ranks(problem, make_optimizer)
    lengths = [param.numel() for param in ranks.models[0].parameters()]
    copies = ranks.parameters()
    for step in range(problem.steps):
        ranks.step(step)
        mine = ranks.parameters()
        for rank, values in enumerate(mine):
            sent = [send(part) for part in torch.split(values - copies[rank], lengths)]
            copies[rank] = copies[rank] + torch.cat(sent)
        for rank, mixed in enumerate(_mixed(matrix, copies, order)):
            ranks.set(rank, mine[rank] + consensus_step * (mixed - copies[rank]))
        ranks.note()
    return ranks.trajectory()


def _mixed(matrix: Tensor, models: Sequence[Tensor], order: int) -> list[Tensor]:
    """Return W X, added up in the order of the ranks, or from the last to the first."""
    size = len(models)
    return [
        mean_in_order([float(weight) * model for weight, model in zip(row, models, strict=True)], order)
        * size
        for row in matrix
    ]
