"""All ranks of a problem in this process, by a paper: what modes are compared with."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from mpisgd.methods.paper_kit import Vec
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.tools.verification.paper_run import Definition, PaperRun, gradients, needs_closure, sum_in_order
from mpisgd.tools.verification.problem import Problem

__all__ = ["MakeOptimizer", "joined_batch", "trajectory"]

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]


def trajectory(
    problem: Problem,
    make_optimizer: MakeOptimizer | None,
    definition: Definition,
    order: int = 1,
    *,
    hosts: Sequence[Sequence[int]] = (),
    max_norm: float = 0.0,
) -> Tensor:
    """Return the parameters of all ranks after each step, [size, steps, numel].

    Args:
        problem: what is trained.
        make_optimizer: of each rank; None where the paper updates by itself.
        definition: the paper, and what it is given.
        order: of additions over the ranks: 1, or -1 for the other one.
        hosts: the ranks of each; all on one by default.
        max_norm: gradients are clipped to this norm; 0: they are not.
    """
    models = [problem.model() for _ in range(problem.size)]
    params = {rank: dict(model.named_parameters()) for rank, model in enumerate(models)}
    optimizers = {}
    if make_optimizer is not None:
        optimizers = {rank: make_optimizer(list(model.parameters())) for rank, model in enumerate(models)}
    run = PaperRun(definition, params, optimizers, hosts=hosts, sum=partial(sum_in_order, order=order))
    joined = _total if definition.paper == Synchronous(sums=True) else _mean
    rows = []
    for step in range(problem.steps):

        def evaluate(rank: int, step: int = step) -> tuple[Tensor, Vec]:
            loss = problem.loss(models[rank], problem.share(step, rank))
            return loss.detach(), gradients(loss, params[rank])

        if optimizers and needs_closure(optimizers[0]):
            run.step_with_closure(evaluate, joined)
        else:
            between = partial(_clipped, max_norm=max_norm)
            run.step({rank: evaluate(rank)[1] for rank in range(problem.size)}, between)
        rows.append([torch.cat([x.flatten() for x in run.x[rank].values()]) for rank in run.ranks])
    return torch.stack([torch.stack(row) for row in rows], dim=1)


def joined_batch(problem: Problem, make_optimizer: MakeOptimizer, max_norm: float = 0.0) -> Tensor:
    """Return the parameters after each step of one process that has the joined batches, [steps, numel]."""
    alone = problem._replace(size=1)
    return trajectory(alone, make_optimizer, Definition(Synchronous()), max_norm=max_norm)[0]


def _mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).mean()


def _total(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum()


def _clipped(g: Vec, max_norm: float) -> Vec:
    """Clip as torch does."""
    if not max_norm:
        return g
    norm = torch.sqrt(torch.stack([grad.square().sum() for grad in g.values()]).sum())
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0)) * g
