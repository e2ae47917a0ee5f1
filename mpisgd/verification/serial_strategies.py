"""The strategies by their papers, with all ranks in one process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.verification.problem import Problem
from mpisgd.verification.serial import MakeOptimizer, Ranks, mean_in_order

__all__ = ["diloco", "elastic_averaging", "gossip", "local_sgd"]


def local_sgd(
    problem: Problem,
    make_optimizer: MakeOptimizer,
    every: int,
    order: int,
    hosts: Sequence[Sequence[int]] = (),
) -> Tensor:
    """Every `every` steps all models become their mean (Stich 2019); in others those of each host (Lin 2020).

    Returns [size, steps, numel].
    """
    ranks = Ranks(problem, make_optimizer)
    for step in range(problem.steps):
        ranks.step(step)
        for members in [range(problem.size)] if (step + 1) % every == 0 else hosts:
            mean = mean_in_order([ranks.parameters()[rank] for rank in members], order)
            for rank in members:
                ranks.set(rank, mean)
        ranks.note()
    return ranks.trajectory()


def diloco(
    problem: Problem, make_optimizer: MakeOptimizer, every: int, lr: float, momentum: float, order: int
) -> Tensor:
    """Every `every` steps an outer SGD with Nesterov momentum takes the mean change (Douillard 2023)."""
    ranks = Ranks(problem, make_optimizer)
    outer = ranks.parameters()[0]
    velocity = torch.zeros_like(outer)
    for step in range(problem.steps):
        ranks.step(step)
        if (step + 1) % every == 0:
            change = outer - mean_in_order(ranks.parameters(), order)
            velocity = momentum * velocity + change
            outer = outer - lr * (change + momentum * velocity)
            for rank in range(problem.size):
                ranks.set(rank, outer)
        ranks.note()
    return ranks.trajectory()


def elastic_averaging(
    problem: Problem, make_optimizer: MakeOptimizer, every: int, alpha: float, order: int
) -> Tensor:
    """Every `every` steps models and centre are drawn to each other (Zhang, Choromanska, LeCun 2015)."""
    ranks = Ranks(problem, make_optimizer)
    centre = ranks.parameters()[0]
    for step in range(problem.steps):
        ranks.step(step)
        if (step + 1) % every == 0:
            apart = [values - centre for values in ranks.parameters()]
            for rank, (values, distance) in enumerate(zip(ranks.parameters(), apart, strict=True)):
                ranks.set(rank, values - alpha * distance)
            centre = centre + alpha * problem.size * mean_in_order(apart, order)
        ranks.note()
    return ranks.trajectory()


def gossip(
    problem: Problem,
    make_optimizer: MakeOptimizer,
    matrix: Tensor,
    order: int,
    *,
    adapts_first: bool = True,
) -> Tensor:
    """X <- W (X - update) in every step, or W X - update (Lian 2017), with W [size, size] by rows."""
    ranks = Ranks(problem, make_optimizer)
    for step in range(problem.steps):
        begun = ranks.parameters()
        ranks.step(step)
        done = ranks.parameters()
        mixed = done if adapts_first else begun
        for rank in range(problem.size):
            parts = [float(weight) * other for weight, other in zip(matrix[rank], mixed, strict=True)]
            mean = mean_in_order(parts, order) * problem.size
            ranks.set(rank, mean if adapts_first else mean + (done[rank] - begun[rank]))
        ranks.note()
    return ranks.trajectory()
