"""The strategies by their papers, with all ranks in one process."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.verification.problem import Problem
from mpisgd.verification.serial.compressors import adaptive_sum
from mpisgd.verification.serial.training import MakeOptimizer, Ranks, mean_in_order

__all__ = ["adasum_of_steps", "diloco", "elastic_averaging", "local_sgd"]


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
    problem: Problem,
    make_optimizer: MakeOptimizer,
    every: int,
    outer: tuple[float, float],
    order: int,
    *,
    fragments: int = 1,
    overlap_steps: int = 0,
    alpha: float = 0.0,
) -> Tensor:
    """Every `every` steps an outer SGD with Nesterov momentum takes the mean change (Douillard 2023).

    Streaming (Douillard 2025): parameters are cut into fragments, which are due in different steps; an outer
    step comes `overlap_steps` after the change that it takes, and ranks keep a share `alpha` of their own.

    Args:
        problem: what is trained.
        make_optimizer: of each rank.
        every: steps between two outer steps of a fragment.
        outer: the learning rate and the momentum.
        order: of additions.
        fragments: how many; f is due f * every / fragments steps later than the first.
        overlap_steps: see above.
        alpha: see above.
    """
    ranks = Ranks(problem, make_optimizer)
    cuts = _cuts([param.numel() for param in ranks.models[0].parameters()], fragments)
    parts = [
        _Fragment(ranks.parameters()[0][begin:end], slice(begin, end), number * every // fragments)
        for number, (begin, end) in enumerate(itertools.pairwise(cuts))
    ]
    for step in range(1, problem.steps + 1):
        ranks.step(step - 1)
        for part in parts:
            since = step - part.first
            if part.change is not None and since % every == overlap_steps:
                part.outer_step(ranks, outer, alpha)
            if since >= 0 and since % every == 0:
                part.take_change(ranks, order)
                if not overlap_steps:
                    part.outer_step(ranks, outer, 0.0)
        ranks.note()
    return ranks.trajectory()


class _Fragment:
    """A part of the parameters, as it was after its last outer step."""

    def __init__(self, values: Tensor, where: slice, first: int) -> None:
        self.first = first
        self.change: Tensor | None = None
        self._values, self._where, self._velocity = values, where, torch.zeros_like(values)

    def take_change(self, ranks: Ranks, order: int) -> None:
        mean = mean_in_order([values[self._where] for values in ranks.parameters()], order)
        self.change = self._values - mean

    def outer_step(self, ranks: Ranks, outer: tuple[float, float], alpha: float) -> None:
        assert self.change is not None
        lr, momentum = outer
        self._velocity = momentum * self._velocity + self.change
        self._values = self._values - lr * (self.change + momentum * self._velocity)
        self.change = None
        for rank, mine in enumerate(ranks.parameters()):
            mine[self._where] = alpha * mine[self._where] + (1 - alpha) * self._values
            ranks.set(rank, mine)


def _cuts(lengths: Sequence[int], count: int) -> list[int]:
    """Return where fragments begin and end: a parameter is in that in which its first element would be."""
    begins = [sum(lengths[:place]) for place in range(len(lengths))]
    total = sum(lengths)
    cuts = [next((at for at in begins if at * count >= part * total), total) for part in range(count)]
    return [*cuts, total]


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


def adasum_of_steps(problem: Problem, make_optimizer: MakeOptimizer) -> Tensor:
    """Ranks step by themselves; the adaptive sum of their steps is added to one model (Maleki 2020).

    Every optimizer keeps a state of its own.
    """
    ranks = Ranks(problem, make_optimizer)
    lengths = [param.numel() for param in ranks.models[0].parameters()]
    for step in range(problem.steps):
        begun = ranks.parameters()[0]
        ranks.step(step)
        moves = [torch.split(values - begun, lengths) for values in ranks.parameters()]
        joined = torch.cat([adaptive_sum(parts) for parts in zip(*moves, strict=True)])
        for rank in range(problem.size):
            ranks.set(rank, begun + joined)
        ranks.note()
    return ranks.trajectory()
