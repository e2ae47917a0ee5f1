"""One rank's part of a schedule: it does the acts in their order, and looks at what comes out."""

import random
from collections.abc import Callable
from typing import Any

import torch

import mpisgd
from fuzzing.schedule import DISK_KINDS, WORLD, Act, Schedule
from fuzzing.schedule_disk import Disk, RankDisk
from mpisgd import elastic
from mpisgd.job.groups import close_group
from mpisgd.threads import scheduling
from mpisgd.threads.service_thread import InheritingThread

DONE = "done"
ENDS = "ends"  # as too few are left


def run_schedule(schedule: Schedule, disk: Disk | None = None) -> str:
    """Do a schedule, on each rank; return DONE, or ENDS where the others may be alive and more.

    Args:
        schedule: what is done.
        disk: where checkpoints are, if there are some.

    Raises:
        PeerLost: a rank was lost, and the schedule does not recover.
    """
    rank = _Rank(schedule, random.Random(f"{schedule.seed} {mpisgd.rank()}"), disk)
    if not schedule.recovers:
        rank.run()
        return DONE

    @elastic.run
    def train(state: elastic.State) -> None:
        rank.run() if mpisgd.size() == schedule.size else rank.run_after_loss(state.number)

    try:
        train(elastic.State(number=schedule.seed % 1000))
    except mpisgd.JobError as exc:
        if "may be alive behind a network partition" not in str(exc):
            raise
        return ENDS
    return DONE


class _Rank:
    """One rank."""

    def __init__(self, schedule: Schedule, rng: random.Random, disk: Disk | None) -> None:
        self._schedule = schedule
        self._disk = None if disk is None else RankDisk(schedule, disk)
        self._rng = rng
        self._me = mpisgd.rank()
        self._groups: dict[int, Any] = {}
        self._members: dict[int, tuple[int, ...]] = {WORLD: tuple(range(schedule.size))}
        self._open: list[Callable[[], None]] = []  # waits for what was begun, and looks at it
        self._threads: list[Callable[[], None]] = []  # the same of threads, which must end before the program

    def run(self) -> None:
        """Do all of it.

        Raises:
            PeerLost: a rank was lost; then each of the waits has ended so, or well.
        """
        try:
            self._run()
        except mpisgd.PeerLost:
            for look in (*self._threads, *self._open):
                _end_after_loss(look)
            raise
        finally:  # a future of torch that holds an error would keep itself alive by the frames in that
            self._threads.clear()
            self._open.clear()

    def _run(self) -> None:
        self._groups[WORLD] = mpisgd.new_group(range(self._schedule.size))
        for act in self._schedule.acts:
            if act.kind == "group":
                self._groups[act.number] = mpisgd.new_group(act.members)
                self._members[act.number] = act.members
            elif act.kind == "thread" and act.group == WORLD:
                self._thread(act, self._groups[WORLD], self._members[WORLD])
            elif act.kind in DISK_KINDS and self._me in self._members[act.group]:
                getattr(self._disk, act.kind)(act, self._groups[act.group])
            elif act.kind != "thread" and self._me in self._members[act.group]:
                getattr(self, f"_{act.kind}")(act, self._groups[act.group], self._members[act.group])
            while self._open and self._rng.random() < 0.3:
                self._open.pop(self._rng.randrange(len(self._open)))()
        while self._threads:
            self._threads.pop()()
        if self._disk is not None and self._schedule.seed % 3:  # else it comes while something is written
            self._disk.wait_for_all()
        if self._rng.random() < 0.7:  # else the end of the program comes with operations in flight
            while self._open:
                self._open.pop(0)()

    def run_after_loss(self, number: int) -> None:
        """Work with those that are left."""
        assert number == self._schedule.seed % 1000, f"the commit has {number}"
        size = mpisgd.size()
        for group in (None, mpisgd.new_group(range(size))):
            tensor = torch.full((3,), mpisgd.rank() + 1.0)
            mpisgd.all_reduce(tensor, group=group)
            _expect(tensor, size * (size + 1) / 2, Act("sum after a loss"))
        if self._disk is not None:
            self._disk.load_after_loss()

    def _close(self, act: Act, group: Any, members: tuple[int, ...]) -> None:
        if self._disk is not None:
            self._disk.close(act.group)
        close_group(group)

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
            _wait_for_future(done)
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


def _end_after_loss(look: Callable[[], None]) -> None:
    """Wait for the end of what was begun before a loss, which is its own or PeerLost."""
    try:
        look()
    except mpisgd.PeerLost:
        pass
    except mpisgd.NotInitialized:
        pass


def _wait_for_future(future: torch.futures.Future[Any]) -> None:
    """Wait for what a callback returns; torch tells of its errors by RuntimeErrors with their text."""
    try:
        scheduling.wait_for_future(future)
    except RuntimeError as exc:
        if "PeerLost" not in str(exc):
            raise
        raise mpisgd.PeerLost(str(exc)) from exc
