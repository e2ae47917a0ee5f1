"""Strategies in which nobody waits: what no order of the ranks' updates can change.

When an update arrives depends on time, and with it the parameters at which the next gradient is taken. So the
loss here is linear in the parameters: its gradients are those of the examples wherever they are taken, and
at the end all updates add up to the training of one process. What was applied is counted, too.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.tools.verification.mode import Mode, Reference, between_orders
from mpisgd.tools.verification.modes.synchronous import distributed, equal_to_one_process, native
from mpisgd.tools.verification.problem import Problem, embedding_problem, linear_problem
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import joined_batch

__all__ = ["ASYNCHRONOUS"]

FAMILY = "asynchronous"
LEAD = 2  # steps
NEAR = 1e-3  # of parameters
TOGETHER_S = 20.0


def plain(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD whose updates add up."""
    return torch.optim.SGD(params, lr=0.05)


def pushed(strategy: mpisgd.ParameterServer) -> Callable[[Trainer], Tensor]:
    """Return the training by a parameter server: the parameters at its end, and what was counted.

    That is the fewest and the most updates of a rank in a shard, and by how many steps a rank has been too
    far ahead of the slowest.
    """

    def train(trainer: Trainer) -> Tensor:
        model, optimizer = distributed(trainer, plain, strategy=strategy)
        trainer.train(model, optimizer)
        server: Any = optimizer.synchronizer
        server.finish()
        mpisgd.barrier()  # counts may be looked at when all have finished
        return _row(model, _counted(server.counters(), strategy.staleness_steps))

    return train


def _counted(counters: Any, staleness_steps: int | None) -> list[float]:
    applied = [count for shard in counters.applied for count in shard]
    ahead = 0 if staleness_steps is None else max(0, *counters.lead) - staleness_steps
    return [min(applied), max(applied), max(0, ahead)]


def averaged(trainer: Trainer) -> Tensor:
    """Train with pairs of ranks that average at any time; return the mean of all models at the end.

    With it goes whether they come together when no gradient drives them apart any more: a mean of ranks that
    never meet would be the same.
    """
    strategy = mpisgd.Gossip("ring", style="asynchronous")
    model, optimizer = distributed(trainer, plain, strategy=strategy)
    trainer.train(model, optimizer)
    together = _come_together(model, optimizer)
    optimizer.rebuild(trainer.alone())  # ends the exchanges
    row = _row(model, [float(together)])
    mpisgd.all_reduce(row, mpisgd.ReduceOp.AVG)
    return row


def _come_together(model: nn.Module, optimizer: mpisgd.DistributedOptimizer) -> bool:
    """Return whether ranks without gradients come near to each other in time; at once where they cannot."""
    deadline = time.monotonic() + (TOGETHER_S if optimizer.spans_job else 0.0)
    while (apart := _spread(model)) > NEAR and _agreed(time.monotonic() < deadline):
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        time.sleep(0.001)
    return apart <= NEAR


def _spread(model: nn.Module) -> float:
    """Return the largest difference between two ranks' parameters. Collective."""
    mine = torch.cat(_flat(model)).double()
    both = torch.stack([mine, -mine])
    mpisgd.all_reduce(both, mpisgd.ReduceOp.MAX)
    return float((both[0] + both[1]).max())


def _agreed(answer: bool) -> bool:
    """Return whether rank 0 says so. Collective."""
    return bool(mpisgd.broadcast_object(answer))


def _flat(model: nn.Module) -> list[Tensor]:
    return [param.detach().flatten() for param in model.parameters()]


def _row(model: nn.Module, facts: Sequence[float]) -> Tensor:
    """Return the parameters and what else is compared, [1, numel]."""
    flat = torch.cat(_flat(model))
    return torch.cat([flat, flat.new_tensor(facts)]).unsqueeze(0)


def _at_the_end(facts: Callable[[Problem], Sequence[float]]) -> Callable[[Problem], Reference]:
    """Return the reference: one process, and what is to be counted."""

    def simulate(problem: Problem, order: int) -> Tensor:
        end = joined_batch(problem, plain)[-1]
        return torch.cat([end, end.new_tensor(list(facts(problem)))]).unsqueeze(0)

    return between_orders(simulate, "updates come in any order, here examples in another one")


def _served(name: str, strategy: mpisgd.ParameterServer, **options: Any) -> Mode:
    """Without locks each rank has rows of its own: of those that two ranks update one update may be lost."""
    reference = _at_the_end(lambda problem: [problem.steps, problem.steps, 0.0])
    problem = linear_problem if strategy.locked else embedding_problem
    unlocked = {"shares_memory": not strategy.locked, **options}
    return Mode(name, FAMILY, pushed(strategy), reference, problem=problem, stale_gradients=True, **unlocked)


ASYNCHRONOUS = (
    _served('ParameterServer("async")', mpisgd.ParameterServer("async")),
    _served(
        f'ParameterServer("ssp", staleness_steps={LEAD})',
        mpisgd.ParameterServer("ssp", staleness_steps=LEAD),
    ),
    _served('ParameterServer("async", locked=False)', mpisgd.ParameterServer("async", locked=False)),
    _served(
        f'ParameterServer("ssp", staleness_steps={LEAD}, locked=False)',
        mpisgd.ParameterServer("ssp", staleness_steps=LEAD, locked=False),
        quick=False,
    ),
    Mode(
        'ParameterServer("ssp", staleness_steps=0)',
        FAMILY,
        native(plain, strategy=mpisgd.ParameterServer("ssp", staleness_steps=0)),
        equal_to_one_process(plain),
        quick=False,
    ),
    Mode(
        'Gossip("ring", "asynchronous")',
        FAMILY,
        averaged,
        _at_the_end(lambda problem: [1.0]),
        sizes=(2, 2**31),
        problem=linear_problem,
        stale_gradients=True,
    ),
)
