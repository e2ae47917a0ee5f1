"""The engine under random schedules: operations, callbacks, groups, threads, messages, in random order.

    ./scripts/fuzz --schedules 10000 --seed 1

A seed draws what the ranks do and in which order they run. Each value is compared with what it must be; at
the end nothing may be left over. Ranks are threads of this process (`mpisgd.job.threads_as_ranks`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import mpisgd
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.threads import scheduling, wait_registry
from mpisgd.threads.inheriting_thread import InheritingThread

__all__ = ["Act", "Schedule", "check", "draw", "run_schedules"]

KINDS = ("sum", "broadcast", "gather", "barrier", "callback", "message", "thread", "mismatch", "group")
WEIGHTS = (8, 3, 3, 2, 3, 4, 2, 1, 2)
SMALL, LARGE = 3, 50_000  # elements; the large ones go through the staging memory in pieces


class Act(NamedTuple):
    """Something that the members of a group do.

    Attributes:
        kind: one of KINDS.
        group: its place among the groups; 0 is the world.
        numel: elements of each tensor.
        async_op: whether it is waited for later.
        root: a global rank of the group.
        number: makes the values of each act different.
        members: of a new group.
    """

    kind: str
    group: int
    numel: int
    async_op: bool
    root: int
    number: int
    members: tuple[int, ...] = ()


class Schedule(NamedTuple):
    """What a seed draws."""

    size: int
    ranks_per_host: tuple[int, ...]
    acts: tuple[Act, ...]


def draw(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    size = rng.choice((1, 2, 2, 3, 3, 4, 5))
    cuts = sorted(rng.sample(range(1, size), rng.randrange(min(3, size))))
    hosts = tuple(last - first for first, last in zip([0, *cuts], [*cuts, size], strict=True))
    groups, acts = [tuple(range(size))], []
    for number in range(rng.randrange(1, 16)):
        kind = rng.choices(KINDS, WEIGHTS)[0]
        group = rng.randrange(len(groups)) if kind != "group" else 0
        members: tuple[int, ...] = ()
        if kind == "group":
            members = tuple(rng.sample(range(size), rng.randrange(1, size + 1)))
            groups.append(members)
        numel = rng.choice((1, SMALL, SMALL, LARGE))
        acts.append(Act(kind, group, numel, rng.random() < 0.6, rng.choice(groups[group]), number, members))
    return Schedule(size, hosts, tuple(acts))


class _Rank:
    """One rank's part of a schedule."""

    def __init__(self, schedule: Schedule, rng: random.Random) -> None:
        self._schedule = schedule
        self._rng = rng
        self._me = mpisgd.rank()
        self._groups = [mpisgd.new_group(range(schedule.size))]
        self._members = [tuple(range(schedule.size))]
        self._open: list[Callable[[], None]] = []  # waits for what was begun, and looks at it
        self._threads: list[Callable[[], None]] = []  # the same of threads, which must end before the program

    def run(self) -> None:
        """Do all of it."""
        for act in self._schedule.acts:
            if act.kind == "group":
                self._groups.append(mpisgd.new_group(act.members))
                self._members.append(act.members)
            elif act.kind == "thread" and act.group == 0:
                self._thread(act, self._groups[0], self._members[0])
            elif act.kind != "thread" and self._me in self._members[act.group]:
                getattr(self, f"_{act.kind}")(act, self._groups[act.group], self._members[act.group])
            while self._open and self._rng.random() < 0.3:
                self._open.pop(self._rng.randrange(len(self._open)))()
        for look in self._threads:
            look()
        if self._rng.random() < 0.7:  # else the end of the program comes with operations in flight
            for look in self._open:
                look()

    def _value(self, act: Act, rank: int) -> float:
        return float((act.number + 1) * (rank + 1))

    def _mine(self, act: Act) -> torch.Tensor:
        return torch.full((act.numel,), self._value(act, self._me))

    def _later(self, work: Any, act: Act, look: Callable[[], None]) -> None:
        def wait() -> None:
            work.wait()
            look()

        if work is None:
            look()
        else:
            self._open.append(wait)

    def _sum(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        tensor, total = self._mine(act), sum(self._value(act, rank) for rank in members)
        work = mpisgd.all_reduce(tensor, group=group, async_op=act.async_op)
        self._later(work, act, lambda: _expect(tensor, total, act))

    def _broadcast(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        tensor = self._mine(act)
        work = mpisgd.broadcast(tensor, act.root, group=group, async_op=act.async_op)
        self._later(work, act, lambda: _expect(tensor, self._value(act, act.root), act))

    def _gather(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        out = torch.zeros(len(members), act.numel)
        work = mpisgd.all_gather_into_tensor(out, self._mine(act), group=group, async_op=act.async_op)

        def look() -> None:
            for row, rank in zip(out, members, strict=True):
                _expect(row, self._value(act, rank), act)

        self._later(work, act, look)

    def _barrier(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        self._later(mpisgd.barrier(group, async_op=act.async_op), act, lambda: None)

    def _callback(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        """A callback of an operation's future begins another one."""
        first, second = self._mine(act), self._mine(act)
        work = mpisgd.all_reduce(first, group=group, async_op=True)
        inner: list[Any] = []
        done = work.get_future().then(
            lambda _: inner.append(mpisgd.all_reduce(second, group=group, async_op=True))
        )
        total = sum(self._value(act, rank) for rank in members)

        def look() -> None:
            work.wait()
            scheduling.wait_for_future(done)
            inner[0].wait()
            _expect(first, total, act)
            _expect(second, total, act)

        look()  # on all ranks here: what the callback begins has a place in the order

    def _message(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        """Everyone sends to the next one."""
        place = members.index(self._me)
        after, before = members[(place + 1) % len(members)], members[place - 1]
        if after == self._me:
            return
        got = torch.zeros(act.numel)
        works = [
            mpisgd.isend(self._mine(act), after, tag=act.number, group=group),
            mpisgd.irecv(got, before, tag=act.number, group=group),
        ]

        def look() -> None:
            for work in works:
                work.wait()
            _expect(got, self._value(act, before), act)

        self._open.append(look) if act.async_op else look()

    def _thread(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        """Another thread of the program works in a group of its own meanwhile."""
        own, failed = mpisgd.new_group(members), list[Exception]()
        total = sum(self._value(act, rank) for rank in members)

        def work() -> None:
            try:
                for _ in range(3):
                    tensor = self._mine(act)
                    mpisgd.all_reduce(tensor, group=own)
                    _expect(tensor, total, act)
            except Exception as exc:
                failed.append(exc)

        thread = InheritingThread(target=work, name=f"thread of act {act.number}", daemon=True)
        thread.start()

        def look() -> None:
            scheduling.join(thread, None)
            if failed:
                raise failed[0]

        self._threads.append(look)

    def _mismatch(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        """One rank calls something else: all are told, and go on."""
        if len(members) < 2:
            return
        tensor = torch.ones(act.numel + (self._me == act.root))
        try:
            mpisgd.all_reduce(tensor, group=group)
        except mpisgd.CollectiveMismatch:
            return
        raise AssertionError(f"{act}: no mismatch was found")


def _expect(tensor: torch.Tensor, value: float, act: Act) -> None:
    if not bool(tensor.eq(value).all()):
        raise AssertionError(f"{act}: {tensor.flatten()[:4].tolist()} and not {value}")


def check(seed: int) -> str:
    """Run one schedule; return what went wrong, "" if nothing did."""
    schedule = draw(seed)

    def program() -> None:
        _Rank(schedule, random.Random(f"{seed} {mpisgd.rank()}")).run()

    try:
        run_ranks(schedule.size, program, seed=seed, ranks_per_host=schedule.ranks_per_host, limit_s=20.0)
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    left = wait_registry.registered()
    return f"waits were left over: {left}" if left else ""


def run_schedules(seeds: range) -> int:
    """Run many, print those that went wrong, and return how many these were."""
    began_s, wrong = time.monotonic(), 0
    for seed in seeds:
        if said := check(seed):
            wrong += 1
            print(f"seed {seed}: {said}\n    {draw(seed)}", flush=True)
    took_s = time.monotonic() - began_s
    rate = len(seeds) / took_s
    print(f"{len(seeds)} schedules in {took_s:.1f} s, {rate:.1f} per second; {wrong} failed")
    return wrong
