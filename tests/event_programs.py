"""Trainings in which nobody waits, with a log of what happened, and their replay by a paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from paper_programs import LR, Make, Program, momentum
from torch import Tensor, nn

import mpisgd
from mpisgd.event_log import Entry, EventLog
from mpisgd.methods.diloco.quorum.paper import DecoupledDiLoCo
from mpisgd.methods.gossip.ad_psgd.paper import ADPSGD
from mpisgd.methods.paper_kit import Paper, Vec
from mpisgd.methods.parameter_server.paper import ParameterServer as PaperOfServer
from mpisgd.threads import scheduling
from mpisgd.tools.verification.paper_run import Definition, PaperRun, gradients
from mpisgd.tools.verification.replay import in_order

PAUSES_S = (0.0, 0.001, 0.02)  # at most, of a rank; a message takes up to 0.001 between threads

Params = dict[str, Tensor]


class Recorded(NamedTuple):
    """What a rank has."""

    entries: list[Entry]
    params: Params
    after: list[Params]  # of its steps
    outer: Sequence[Entry] = ()  # what has happened to the outer parameters of DiLoCo, on its first rank


def slow_sgd(params: Sequence[Tensor]) -> torch.optim.Optimizer:
    """SGD with momentum during whose update others may do something: also while it has a lock."""
    return _Slow(params, lr=LR, momentum=0.5)


class _Slow(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        scheduling.sleep(0.001)
        super().step(closure)


def record(
    program: Program,
    strategy: mpisgd.Strategy,
    seed: int = 0,
    more: int = 0,
    before_step: Callable[[int, Recorded], None] = lambda step, so_far: None,
) -> Recorded:
    """Train on this rank, in its own time, for so many steps more. Collective.

    Args:
        before_step: is given the number of each step, and what there is so far.
    """
    rank, chance = mpisgd.rank(), Random(1000 * seed + mpisgd.rank())
    pause_s, params = chance.choice(PAUSES_S), program.start(rank)
    optimizer: Any = mpisgd.DistributedOptimizer(
        program.make(list(params.values())), params.items(), strategy=strategy, check_start=False
    )
    optimizer.synchronizer.events = EventLog()
    entries, after, outer = optimizer.synchronizer.events.entries, [], EventLog()
    if isinstance(strategy, mpisgd.DiLoCo):
        optimizer.synchronizer.outer_events = outer
    if isinstance(strategy, mpisgd.ParameterServer) and rank in (strategy.servers or ()):
        optimizer.synchronizer.serve()
        return Recorded(entries, _copies(params), after)
    for step in range(program.steps + more):
        scheduling.sleep(pause_s * chance.random())
        optimizer.zero_grad()
        for term in program.terms(rank, step):
            program.loss(params, rank, term).backward()
        scheduling.sleep(pause_s * chance.random())
        before_step(step, Recorded(entries, _copies(params), after, outer.entries))
        if isinstance(strategy, mpisgd.DiLoCo):
            optimizer.synchronizer.next_batch(examples=chance.randint(1, 4))
        optimizer.step()
        after.append(_copies(params))
    if isinstance(strategy, mpisgd.Gossip):
        optimizer.rebuild()
    else:
        optimizer.synchronizer.finish()
    return Recorded(entries, _copies(params), after, outer.entries)


def _copies(params: Mapping[str, Tensor]) -> Params:
    return {name: param.detach().clone() for name, param in params.items()}


def paper_of_events(strategy: mpisgd.Strategy, size: int) -> Paper[Any]:
    if isinstance(strategy, mpisgd.Gossip):
        return ADPSGD()
    if isinstance(strategy, mpisgd.DiLoCo):
        return DecoupledDiLoCo(by_examples=strategy.weights != "equal")
    bound = float("inf") if strategy.staleness_steps is None else strategy.staleness_steps
    return PaperOfServer(share=1 / (size - len(strategy.servers or ())), lr=LR, bound=bound)


def replay(
    program: Program,
    paper: Paper[Any],
    recorded: Mapping[int, Recorded],
    make: Make | None = None,
    *,
    close: float = 0.0,
) -> PaperRun:
    """Let the paper repeat it; fail where a gradient is not that of the parameters that it has then.

    Args:
        close: how far that may be, as a share of the largest element.
    """
    params = {rank: program.start(rank) for rank in recorded}
    optimizers = {rank: (make or program.make)(list(mine.values())) for rank, mine in params.items()}
    run = PaperRun(Definition(paper), params, optimizers)
    steps: Counter[int] = Counter()
    logs: dict[int, Sequence[Entry]] = {rank: one.entries for rank, one in recorded.items()}
    logs |= {-1 - rank: one.outer for rank, one in recorded.items()}
    for event in in_order(logs):
        if event.what == "step" and event.g:
            rank = event.ranks[0]
            _check_gradient(program, run, rank, steps[rank], event.g, close)
            steps[rank] += 1
        run.event(event)
    return run


def _check_gradient(program: Program, run: PaperRun, rank: int, step: int, g: Vec, close: float) -> None:
    leaves = {name: value.clone().requires_grad_() for name, value in run.x[rank].items()}
    for term in program.terms(rank, step):
        expected = gradients(program.loss(leaves, rank, term), leaves)
        wrong = [name for name in expected if not _equal(g[name], expected[name], close)]
        assert not wrong, f"rank {rank}, step {step}: the gradient of {wrong} is one at other parameters"


def _equal(one: Tensor, other: Tensor, close: float) -> bool:
    """Return whether bits are equal; with `close`, whether numbers are that near."""
    if not close:
        return torch.equal(one, other)
    return float((one - other).abs().max()) <= close * float(other.abs().max())


def assert_replayed(
    program: Program, strategy: mpisgd.Strategy, recorded: Sequence[Recorded], *, close: float = 0.0
) -> None:
    """Fail unless the paper ends with the same bits on every rank; `close` as in `replay`."""
    servers = getattr(strategy, "servers", None) or ()
    workers = {rank: one for rank, one in enumerate(recorded) if rank not in servers}
    for order in (workers, dict(reversed(workers.items()))):  # which of the possible orders does not matter
        ranks_in_order = {rank: order[rank] for rank in order}
        run = replay(program, paper_of_events(strategy, len(recorded)), ranks_in_order, close=close)
        for rank, one in workers.items():
            wrong = [name for name in one.params if not _equal(run.x[rank][name], one.params[name], close)]
            assert not wrong, f"rank {rank} ends with other {wrong}"


def wrapped(params: dict[str, nn.Parameter], strategy: Any, **options: Any) -> Any:
    """Return an optimizer with momentum of these parameters."""
    return mpisgd.DistributedOptimizer(
        momentum(list(params.values())), params.items(), strategy=strategy, **options
    )


def one_step(program: Program, params: dict[str, nn.Parameter], optimizer: Any, step: int) -> None:
    """Train a step, of which each rank says another number of examples."""
    rank = mpisgd.rank()
    optimizer.zero_grad()
    program.loss(params, rank, program.terms(rank, step)[0]).backward()
    optimizer.synchronizer.next_batch(examples=1 + (rank + step) % 3)
    optimizer.step()
