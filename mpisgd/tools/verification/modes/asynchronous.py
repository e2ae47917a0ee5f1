"""Strategies in which nobody waits: what no order of the ranks' updates can change.

When an update arrives depends on time, and with it the parameters at which the next gradient is taken. So the
loss here is linear in the parameters: its gradients are those of the examples wherever they are taken, and
at the end all updates add up to the training of one process. What was applied is counted, too. With a single
worker nothing depends on time, and any loss will do.

Where the loss is linear, ranks of a server start with different parameters: they take those of the first rank
in the first step, whose gradient is that of what they had.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.methods.paper_kit import Event, Vec
from mpisgd.methods.parameter_server.paper import ParameterServer
from mpisgd.tools.verification.mode import TURNED, Mode, Reference, between_orders
from mpisgd.tools.verification.modes.synchronous import (
    apart_from_the_first,
    distributed,
    equal_to_one_process,
    native,
    sgd,
)
from mpisgd.tools.verification.paper_run import Definition, PaperRun, gradients
from mpisgd.tools.verification.problem import Problem, embedding_problem, flat_parameters, linear_problem
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trajectories import joined_batch

__all__ = ["ASYNCHRONOUS"]

FAMILY = "asynchronous"
LEAD = 2  # steps
PUSH_EVERY, PULL_EVERY = 4, 3  # steps; of both there are some at the end that make no whole period
NEAR = 1e-3  # of parameters
TOGETHER_S = 20.0


def plain(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Return SGD whose updates add up."""
    return torch.optim.SGD(params, lr=0.05)


def pushed(strategy: mpisgd.ParameterServer) -> Callable[[Trainer], Tensor]:
    """Return the training by a parameter server: the parameters at its end, and what was counted.

    That is the fewest and the most updates of a worker in a shard, and by how many steps one has been too
    far ahead of the slowest. Where some ranks only serve, the others divide the batches among them.
    """

    def train(trainer: Trainer) -> Tensor:
        asked = _alone(strategy) if trainer.sabotage is Sabotage.NO_COMMUNICATION else strategy
        model, optimizer = distributed(trainer, plain, strategy=asked)
        apart_from_the_first(model)
        server: Any = optimizer.synchronizer
        served = asked.servers or ()
        if trainer.rank in served:
            server.serve()
        else:
            for step in range(trainer.problem.steps):
                place, count = (trainer.rank, None) if not served else _among_workers(trainer, served)
                trainer.step(step, model, optimizer, rank=place, size=count)
            server.finish()
        mpisgd.barrier()  # counts may be looked at when all have finished
        return _row(model, _counted(server.counters(), strategy.staleness_steps, served))

    return train


def _alone(strategy: mpisgd.ParameterServer) -> mpisgd.ParameterServer:
    """Return the strategy of a rank that has nobody to serve it."""
    return dataclasses.replace(strategy, servers=None)


def _among_workers(trainer: Trainer, served: Sequence[int]) -> tuple[int, int]:
    """Return the place of this rank among the workers, and how many these are."""
    workers = [rank for rank in range(trainer.problem.size) if rank not in served]
    return workers.index(trainer.rank), len(workers)


def _counted(counters: Any, staleness_steps: int | None, served: Sequence[int] = ()) -> list[float]:
    applied = [n for shard in counters.applied for rank, n in enumerate(shard) if rank not in served]
    ahead = 0 if staleness_steps is None else max(0, *counters.lead) - staleness_steps
    return [min(applied), max(applied), max(0, ahead)]


def by_one_worker(trainer: Trainer) -> Tensor:
    """Train with the last rank, whom all others serve; return its parameters after each step, and at the end.

    A rank that serves looks at its parameters at the end alone: before, these are the model's own.
    """
    start, steps, last = trainer.problem.model(), trainer.problem.steps, trainer.problem.size - 1
    strategy = mpisgd.ParameterServer(
        "async", servers=tuple(range(last)), push_every=PUSH_EVERY, pull_every=PULL_EVERY
    )
    is_alone = trainer.sabotage is Sabotage.NO_COMMUNICATION
    model, optimizer = distributed(trainer, sgd, strategy=_alone(strategy) if is_alone else strategy)
    server: Any = optimizer.synchronizer
    rows = [flat_parameters(start)] * steps
    if trainer.rank == last:
        rows = trainer.train(model, optimizer)
        server.finish()
    elif not is_alone:
        server.serve()
    return torch.stack([*rows, flat_parameters(model)])


def of_one_worker(problem: Problem, order: int) -> Tensor:
    """Return the parameters of `by_one_worker` on each rank, by the paper: [size, steps + 1, numel]."""
    model, last = problem.model(), problem.size - 1
    start, params = flat_parameters(model), dict(model.named_parameters())
    optimizers = {last: sgd(list(params.values()))}
    run = PaperRun(Definition(ParameterServer(share=1.0, lr=0.05)), {last: params}, optimizers)
    rows = []
    for step in range(problem.steps):
        found = gradients(problem.loss(model, problem.share(step, last)), params)
        run.event(Event("step", (last,), found))
        if (step + 1) % PUSH_EVERY == 0:
            run.event(Event("push", (last,), Vec()))
        if (step + 1) % PULL_EVERY == 0:
            run.event(Event("fetch", (last,), Vec()))
        rows.append(flat_parameters(model))
    if problem.steps % PUSH_EVERY:
        run.event(Event("push", (last,), Vec()))
    run.event(Event("fetch", (last,), Vec()))
    end = flat_parameters(model)
    serving = torch.stack([*[start] * problem.steps, end])
    return torch.stack([*[serving] * last, torch.stack([*rows, end])])


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
    every = strategy.push_every
    reference = _at_the_end(lambda problem: [-(-problem.steps // every), -(-problem.steps // every), 0.0])
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
    _served(
        f'ParameterServer("async", servers=(0,), push_every={PUSH_EVERY}, pull_every={PULL_EVERY})',
        mpisgd.ParameterServer("async", servers=(0,), push_every=PUSH_EVERY, pull_every=PULL_EVERY),
        sizes=(2, 2**31),
    ),
    Mode(
        f'ParameterServer("async", push_every={PUSH_EVERY}, pull_every={PULL_EVERY}), one worker',
        FAMILY,
        by_one_worker,
        between_orders(of_one_worker, TURNED),
        (2, 2**31),
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
