"""The training that is disturbed: learners of `DiLoCo(quorum=)`, under mpirun or as threads of one process.

A step takes `step_s`, of which little is computing: so a learner is as fast when others leave it their cores.
Learner 0 has the outer parameters, and is neither stopped nor killed. Where the ranks of a host are one
learner, a rank that is stopped stops its learner, and one that is killed ends it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import mpisgd
from mpisgd.errors import LearnerLost
from mpisgd.event_log import EventLog
from mpisgd.threads.scheduling import now_s, sleep

__all__ = ["Acts", "Case", "Fault", "Seen", "drawn", "learn"]

BATCH, CLASSES, LR = 64, 10, 0.002
JITTER = 0.1  # a step takes so much more or less
SHORTEST_S, LONGEST_S = 2.0, 6.0  # of a stop
END_S = 1.0  # until all have noticed every loss


class Case(NamedTuple):
    """What is tried.

    Attributes:
        hosts: how many.
        learners: on each; where these are together, its ranks.
        stops: how often a learner is stopped, which goes on after some seconds.
        kills: how many learners are killed for good.
        seconds: of training.
        quorum, grace_s: see `DiLoCo`.
        sync_every: steps from one outer step to the next.
        step_s: seconds of a step.
        seed: of the data, the faults and the pace.
        steps: of each learner, instead of `seconds`; 0: as many as there is time for.
        decays: whether the learning rate falls to 0 by the end, in a straight line; else it is constant.
        together: whether the ranks of a host are one learner.
    """

    hosts: int = 4
    learners: int = 1
    stops: int = 0
    kills: int = 0
    seconds: float = 120.0
    quorum: int = 2
    grace_s: float = 0.5
    sync_every: int = 100
    step_s: float = 0.02
    seed: int = 0
    steps: int = 0
    decays: bool = False
    together: bool = False

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.hosts * self.learners

    @property
    def num_learners(self) -> int:
        """The number of learners."""
        return self.hosts if self.together else self.size


class Fault(NamedTuple):
    """What happens to a rank, so many seconds after the beginning; `stop_s` 0: it is killed."""

    rank: int
    at_s: float
    stop_s: float = 0.0


class Acts(NamedTuple):
    """What faults do.

    Attributes:
        stop: stops this rank for so many seconds.
        die: ends it.
        tell: notes what was seen of it so far.
    """

    stop: Callable[[float], None]
    die: Callable[[], object]
    tell: Callable[[Seen], None]


class Seen(NamedTuple):
    """What was seen of a rank; the last four are the first one's.

    Attributes:
        rank: which.
        steps: that it has taken.
        there_s: how long it was there, without its stops.
        waited_s: how long it was in steps after which it sent its parameters.
        longest_s: its longest step.
        outer_steps: how many there were.
        without_some: how many of these without a part of some learner.
        loss: after all, on other data.
    """

    rank: int
    steps: int
    there_s: float
    waited_s: float
    longest_s: float
    outer_steps: int = 0
    without_some: int = 0
    loss: float = 0.0


def drawn(case: Case) -> list[Fault]:
    """Draw who is killed when, and stops of learners that are there then, one after another."""
    dice = random.Random(case.seed)

    def one_of(learner: int) -> int:
        return case.learners * learner + dice.randrange(case.learners) if case.together else learner

    victims = dice.sample(range(1, case.num_learners), case.kills)
    killed = {learner: case.seconds * dice.uniform(0.1, 0.9) for learner in victims}
    faults = [Fault(one_of(learner), at_s) for learner, at_s in killed.items()]
    room_s = case.seconds / max(1, case.stops)
    for place in range(case.stops):
        stop_s = dice.uniform(SHORTEST_S, min(LONGEST_S, 0.8 * room_s))
        at_s = place * room_s + dice.uniform(0, room_s - stop_s)
        there = [i for i in range(1, case.num_learners) if killed.get(i, 1e9) > at_s + stop_s + 1]
        if there:
            faults.append(Fault(one_of(dice.choice(there)), at_s, stop_s))
    return faults


class _Task:
    """Classes of random inputs by a network of fixed random weights, learned by a larger one.

    Args:
        case: has the seed.
    """

    def __init__(self, case: Case) -> None:
        draw = torch.Generator().manual_seed(case.seed)
        self._teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, CLASSES))
        self.model = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, CLASSES))
        with torch.no_grad():
            for param in (*self._teacher.parameters(), *self.model.parameters()):
                bound = param.shape[-1] ** -0.5
                param.copy_(torch.rand(param.shape, generator=draw) * 2 * bound - bound)

    def loss(self, draw: torch.Generator, count: int) -> Tensor:
        """Return the mean loss of so many new examples."""
        inputs = torch.randn(count, 32, generator=draw)
        with torch.no_grad():
            labels = self._teacher(3 * inputs).argmax(1)
        return nn.functional.cross_entropy(self.model(inputs), labels)


def learn(case: Case, faults: Sequence[Fault], acts: Acts) -> None:
    """Be a rank; at the end all that are left return, or are killed.

    Raises:
        LearnerLost: another rank of this one's learner was killed.
    """
    rank = mpisgd.rank()
    task, pace = _Task(case), random.Random(1000 * case.seed + rank)
    optimizer: Any = mpisgd.DistributedOptimizer(
        torch.optim.AdamW(task.model.parameters(), lr=LR),
        strategy=mpisgd.DiLoCo(
            case.sync_every,
            quorum=case.quorum,
            grace_s=case.grace_s,
            learners="host" if case.together else "rank",
        ),
    )
    method = optimizer.synchronizer
    method.outer_events = EventLog()
    mine = sorted((each for each in faults if each.rank == rank), key=lambda each: each.at_s)
    draw = torch.Generator().manual_seed(1000 * case.seed + rank + 1)
    mpisgd.barrier()
    began_s, stopped_s, longest_s, waited_s, step = now_s(), 0.0, 0.0, 0.0, 0

    def seen(at_s: float) -> Seen:
        return Seen(rank, step, at_s - began_s - stopped_s, waited_s, longest_s)

    def trained_s() -> float:
        """Return since when this rank trains, as all ranks of its learner have it."""
        told = torch.tensor([now_s() - began_s], dtype=torch.float64)
        if case.together:
            mpisgd.broadcast(told, method.model_group.ranks[0], method.model_group)
        return float(told)

    try:
        while step < case.steps if case.steps else (at_s := trained_s()) < case.seconds:
            step_began_s = now_s()
            if mine and step_began_s - began_s >= mine[0].at_s:
                fault = mine.pop(0)
                if not fault.stop_s:
                    acts.tell(seen(step_began_s))
                    acts.die()
                acts.stop(fault.stop_s)
                stopped_s += now_s() - step_began_s
                step_began_s = now_s()
            if case.decays and step:  # in the first step all options must be alike
                done = step / case.steps if case.steps else at_s / case.seconds
                for group in optimizer.param_groups:
                    group["lr"] = LR * max(0.0, 1 - done)
            optimizer.zero_grad()
            task.loss(draw, BATCH).backward()
            takes_s = case.step_s * pace.uniform(1 - JITTER, 1 + JITTER)
            sleep(max(0.0, takes_s - (now_s() - step_began_s)))
            sync_began_s, version = now_s(), method.state.version
            optimizer.step()
            took_s, step = now_s() - sync_began_s, step + 1
            longest_s = max(longest_s, took_s * (step > 1))
            waited_s += took_s * (method.state.version != version)
    except LearnerLost:
        acts.tell(seen(now_s()))
        raise
    ended_s = now_s()  # the wait for the others at the end is nobody's training
    method.finish()
    outer = [len(set(entry.ranks)) for entry in method.outer_events.entries]
    with torch.no_grad():
        loss = float(task.loss(torch.Generator().manual_seed(99), 20_000))
    few = sum(count < case.num_learners for count in outer)
    acts.tell(seen(ended_s)._replace(outer_steps=len(outer), without_some=few, loss=loss))
    sleep(END_S)
