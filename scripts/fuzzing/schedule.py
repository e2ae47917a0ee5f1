"""A schedule as data: what ranks do, in which order they run, which of them are lost; and how it is drawn."""

from __future__ import annotations

import random
from typing import NamedTuple

from mpisgd.job.threads_as_ranks import Fault, Loss

__all__ = ["KINDS", "WORLD", "Act", "Schedule", "draw"]

KINDS = {
    "sum": 8,
    "broadcast": 3,
    "gather": 3,
    "barrier": 2,
    "callback": 3,
    "message": 4,
    "thread": 2,
    "mismatch": 1,
    "group": 3,
    "close": 2,
}
SMALL, LARGE = 3, 50_000  # elements; the large ones go through the staging memory in pieces
LOSS_SHARE = 0.4  # of the schedules that have one
FAULT_SHARE = 0.3  # of the others in which memory cannot be had
HOST_SHARE = 0.3  # of these losses that are of a host
WORLD = -1


class Act(NamedTuple):
    """Something that the members of a group do.

    Attributes:
        kind: one of KINDS.
        group: the number of the act that has made it; WORLD.
        numel: elements of each tensor.
        async_op: whether it is waited for later.
        root: a global rank of the group.
        number: of the act; makes its values different from those of others.
        members: of a new group.
    """

    kind: str
    group: int = WORLD
    numel: int = 1
    async_op: bool = False
    root: int = 0
    number: int = 0
    members: tuple[int, ...] = ()


class Schedule(NamedTuple):
    """A run.

    Attributes:
        seed: decides who runs, how long messages take, and when each rank waits for what it has begun.
        size: how many ranks.
        ranks_per_host: how these are divided.
        acts: what they do.
        loss: of ranks, None for none.
        recovers: whether the others go on by `mpisgd.elastic.run`.
        num_draws: how much the seed decides; None: all.
        faults: allocations of shared memory that fail, without a loss.
    """

    seed: int
    size: int
    ranks_per_host: tuple[int, ...]
    acts: tuple[Act, ...]
    loss: Loss | None = None
    recovers: bool = False
    num_draws: int | None = None
    faults: tuple[Fault, ...] = ()


def draw(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 2, 3, 3, 4, 5))
    cuts = sorted(rng.sample(range(1, size), rng.randrange(min(3, size))))
    hosts = tuple(last - first for first, last in zip([0, *cuts], [*cuts, size], strict=True))
    members_of, acts = {WORLD: tuple(range(size))}, []
    for number in range(rng.randrange(1, 16)):
        kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
        group = rng.choice(list(members_of)) if kind != "group" else WORLD
        if kind == "close" and group == WORLD:
            continue
        members: tuple[int, ...] = ()
        if kind == "group":
            members = members_of[number] = tuple(rng.sample(range(size), rng.randrange(1, size + 1)))
        numel = rng.choice((1, SMALL, SMALL, LARGE))
        root = rng.choice(members_of[group])
        acts.append(Act(kind, group, numel, rng.random() < 0.6, root, number, members))
        if kind == "close":
            del members_of[group]
    loss, recovers = None, False
    if rng.random() < LOSS_SHARE:
        loss, recovers = _draw_loss(rng, hosts), rng.random() < 0.5
    faults = ()
    if loss is None and rng.random() < FAULT_SHARE:
        lasts = rng.choice((0, 0, 1, 99))
        faults = (Fault("allocate", rng.randrange(size), rng.randrange(1, 12), lasts),)
    return Schedule(seed, size, hosts, tuple(acts), loss, recovers, faults=faults)


def _draw_loss(rng: random.Random, hosts: tuple[int, ...]) -> Loss:
    """Draw who is lost, and at which of its waits and messages."""
    ranks: tuple[int, ...] = (rng.randrange(sum(hosts)),)
    if rng.random() < HOST_SHARE:
        host = rng.randrange(len(hosts))
        first = sum(hosts[:host])
        ranks = tuple(range(first, first + hosts[host]))
    return Loss(ranks, int(10 ** rng.uniform(0.0, 2.6)))
