"""A schedule as data: what ranks do, in which order they run, which of them are lost; and how it is drawn."""

import random
from typing import NamedTuple

from mpisgd.job.threads_as_ranks import Fault, Loss
from mpisgd.threads.fault_points import FSYNC, RENAME, WRITE

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
DISK_KINDS = {"save": 3, "write": 3, "load": 2}  # of checkpoints
DISK_SHARE = 0.2  # of the schedules that have some of these
DISK_FAULT_SHARE = 0.8  # of those whose disk fails
SMALL, LARGE = 3, 50_000  # elements; the large ones go through the staging memory in pieces
LOSS_SHARE = 0.4  # of the schedules that have one
FAULT_SHARE = 0.3  # of the others in which memory cannot be had
HOST_SHARE = 0.3  # of these losses that are of a host
WORLD = -1


class Act(NamedTuple):
    """Something that the members of a group do.

    Attributes:
        kind: one of KINDS or of DISK_KINDS.
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
        faults: allocations of shared memory that fail, without a loss, and faults of disks.
    """

    seed: int
    size: int
    ranks_per_host: tuple[int, ...]
    acts: tuple[Act, ...]
    loss: Loss | None = None
    recovers: bool = False
    num_draws: int | None = None
    faults: tuple[Fault, ...] = ()


def draw(seed: int, *, writes: bool = False) -> Schedule:
    """Return the schedule of a seed.

    Args:
        seed: from 0 on.
        writes: whether it has checkpoints in any case, on a disk that fails.
    """
    rng = random.Random(f"disk {seed}")
    schedule = _draw(seed)
    if not writes and rng.random() >= DISK_SHARE:
        return schedule
    acts = _with_checkpoints(rng, schedule)
    faults = schedule.faults
    if writes or rng.random() < DISK_FAULT_SHARE:
        faults = (*faults, *(_draw_disk_fault(rng, schedule, acts) for _ in range(rng.choice((1, 1, 2)))))
    return schedule._replace(acts=acts, faults=faults)


def _with_checkpoints(rng: random.Random, schedule: Schedule) -> tuple[Act, ...]:
    """Return the acts of a schedule with some of checkpoints between them, in groups that are open there."""
    places = [rng.randrange(len(schedule.acts) + 1) for _ in range(rng.randrange(2, 7))]
    acts: list[Act] = []
    is_open, number = (
        {WORLD: tuple(range(schedule.size))},
        1 + max((a.number for a in schedule.acts), default=0),
    )
    for place in range(len(schedule.acts) + 1):
        for _ in range(places.count(place)):
            kind = rng.choices(list(DISK_KINDS), list(DISK_KINDS.values()))[0]
            group = rng.choice(list(is_open)) if rng.random() < 0.4 else WORLD
            numel, root = rng.choice((1, SMALL, LARGE)), rng.choice(is_open[group])
            acts.append(Act(kind, group, numel, rng.random() < 0.6, root, number))
            number += 1
        for act in schedule.acts[place : place + 1]:
            acts.append(act)
            if act.kind == "group":
                is_open[act.number] = act.members
            elif act.kind == "close":
                del is_open[act.group]
    return tuple(acts)


def _draw_disk_fault(rng: random.Random, schedule: Schedule, acts: tuple[Act, ...]) -> Fault:
    """Draw what fails on the disk of a rank that writes: the first one of a group."""
    members = {WORLD: tuple(range(schedule.size)), **{a.number: a.members for a in acts if a.kind == "group"}}
    rank = rng.choice([members[act.group][0] for act in acts if act.kind in DISK_KINDS])
    kind = rng.choices((WRITE, FSYNC, RENAME), (3, 2, 1))[0]
    at = int(10 ** rng.uniform(0.0, 1.3 if kind == WRITE else 0.9))
    lasts = rng.choice((0, 0, 1, 3, 99))
    return Fault(kind, rank, at, lasts, kind == WRITE and rng.random() < 0.4)


def _draw(seed: int) -> Schedule:
    """Return the schedule of a seed without checkpoints."""
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
