"""The engine under random schedules: operations, callbacks, groups, threads, messages and losses.

    ./scripts/fuzz --schedules 10000 --seed 1

A seed draws what the ranks do, in which order they run, whether a rank or a host is lost, and what fails:
allocations, and writes of checkpoints. Each value is compared with what it must be; at the end nothing may be
left over. Ranks are threads of this process (`mpisgd.job.threads_as_ranks`). A schedule that fails is reduced
to fewer acts, ranks and draws, and printed as a program.
"""

import contextlib
import gc
import io
import re
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import mpisgd
from fuzzing.schedule import DISK_KINDS, WORLD, Act, Schedule, draw
from fuzzing.schedule_disk import Disk
from fuzzing.schedule_rank import DONE, ENDS, run_schedule
from mpisgd.job.recovery import has_quorum
from mpisgd.job.threads_as_ranks import LOST, RankFailed, run_ranks
from mpisgd.threads import wait_registry
from mpisgd.threads.fault_points import ALLOCATE

MOST_DRAWS = 2**14


def shrink(
    schedule: Schedule, said: str, check: Callable[[Schedule], str], *, max_runs: int = 150
) -> Schedule:
    """Return the smallest schedule found that fails in the same way.

    Args:
        schedule: fails.
        said: how, as `check` says it; the words before its colon count.
        check: runs a schedule.
        max_runs: how many are run at most.
    """
    kind, left = said.partition(":")[0], max_runs

    def fails(smaller: Schedule) -> bool:
        nonlocal left
        left -= 1
        return check(smaller).partition(":")[0] == kind

    while left > 0:
        for smaller in _smaller(schedule):
            if left <= 0 or fails(smaller):
                break
        else:
            break
        if left > 0:
            schedule = smaller
    left = max(left, 20)  # draws are worth some runs in any case
    return _with_fewer_draws(schedule, fails)


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    """Smaller schedules, the smallest first."""
    if schedule.loss is not None:
        yield schedule._replace(loss=None, recovers=False)
    if schedule.recovers:
        yield schedule._replace(recovers=False)
    if schedule.faults:
        yield schedule._replace(faults=())
    acts = schedule.acts
    length = len(acts)
    while length:
        for start in range(0, len(acts), length):
            yield _without(schedule, {act.number for act in acts[start : start + length]})
        length //= 2
    if schedule.size > 1:
        yield _with_fewer_ranks(schedule)
    if len(schedule.ranks_per_host) > 1:
        yield schedule._replace(ranks_per_host=(schedule.size,))
    for at, act in enumerate(acts):
        for simple in (act._replace(numel=1), act._replace(async_op=False)):
            if simple != act:
                yield schedule._replace(acts=(*acts[:at], simple, *acts[at + 1 :]))


def _without(schedule: Schedule, numbers: set[int]) -> Schedule:
    """Return a schedule without some acts, and without what is done in groups that they have made."""
    kept = tuple(act for act in schedule.acts if act.number not in numbers and act.group not in numbers)
    return schedule._replace(acts=kept)


def _with_fewer_ranks(schedule: Schedule) -> Schedule:
    """Return a schedule without the last rank."""
    gone = schedule.size - 1
    hosts = [*schedule.ranks_per_host[:-1], schedule.ranks_per_host[-1] - 1]
    members_of = {WORLD: tuple(range(gone))}
    acts: list[Act] = []
    for act in schedule.acts:
        if act.kind == "group":
            members = tuple(rank for rank in act.members if rank != gone)
            if not members:
                continue
            members_of[act.number] = members
            act = act._replace(members=members)
        if act.group not in members_of:
            continue
        inside = members_of[act.group]
        acts.append(act if act.root in inside else act._replace(root=inside[0]))
    loss = schedule.loss
    faults = tuple(fault for fault in schedule.faults if fault.rank < gone)
    if loss is not None:
        loss = loss._replace(ranks=tuple(rank for rank in loss.ranks if rank != gone) or (gone - 1,))
    return schedule._replace(
        size=gone,
        ranks_per_host=tuple(count for count in hosts if count),
        acts=tuple(acts),
        loss=loss,
        faults=faults,
    )


def _with_fewer_draws(schedule: Schedule, fails: Callable[[Schedule], bool]) -> Schedule:
    """Return a schedule of which the seed decides no more than it must for it to fail."""
    low, high = -1, 0  # does not fail with `low` draws
    while not fails(schedule._replace(num_draws=high)):
        low, high = high, max(8, high * 4)
        if high > MOST_DRAWS:
            return schedule
    while high - low > 1:
        middle = (low + high) // 2
        if fails(schedule._replace(num_draws=middle)):
            high = middle
        else:
            low = middle
    return schedule._replace(num_draws=high)


def python_text(schedule: Schedule) -> str:
    """Return a program that runs a schedule, from `scripts`, and says what goes wrong."""
    acts = ",\n    ".join(repr(act) for act in schedule.acts)
    others = ", ".join(
        f"{name}={value!r}" for name, value in schedule._asdict().items() if name not in ("acts", "seed")
    )
    return (
        "from fuzzing.schedule import Act, Fault, Loss, Schedule\n"
        "from fuzzing.schedules import check\n\n"
        f"acts = (\n    {acts},\n)\n"
        f"print(check(Schedule(seed={schedule.seed}, acts=acts, {others})))"
    )


LIMIT_S = 120.0  # of real time: a deadlock is found at once
LOOK_EVERY = 100  # schedules, for what is left over of a process: to collect garbage takes longer than one
COLLECTIONS = 5  # what a future of torch holds is garbage only after the future was collected
SHARED_MEMORY = "/memfd:mpisgd"


def check(schedule: Schedule) -> str:
    """Run a schedule; return what went wrong, its kind first, "" if nothing did."""
    if not any(act.kind in DISK_KINDS for act in schedule.acts):
        return _check(schedule, None)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        return _check(schedule, Disk(Path(folder)))  # which tells of each checkpoint that is not written


def _check(schedule: Schedule, disk: Disk | None) -> str:
    try:
        outcomes = run_ranks(
            schedule.size,
            lambda: run_schedule(schedule, disk),
            seed=schedule.seed,
            ranks_per_host=schedule.ranks_per_host,
            limit_s=LIMIT_S,
            losses=None if schedule.loss is None else [schedule.loss],
            num_draws=schedule.num_draws,
            faults=schedule.faults,
        )
        if disk is not None and (said := disk.wrong()):
            return said
    except RankFailed as exc:
        error = exc.errors[exc.rank]
        return f"{type(error).__name__}: on rank {exc.rank}: {error}"
    except Exception as exc:
        return f"{type(exc).__name__}: {exc}"
    if waits := wait_registry.registered():
        return f"left over: waits: {waits}"
    return _wrong_outcome(schedule, outcomes)


def _wrong_outcome(schedule: Schedule, outcomes: list[object]) -> str:
    """Return what the ranks' outcomes must not be, "" where they may."""
    lost = [rank for rank, outcome in enumerate(outcomes) if outcome is LOST]
    if lost and (schedule.loss is None or tuple(lost) != tuple(schedule.loss.ranks)):
        return f"lost: the ranks {lost} have ended"
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, mpisgd.PeerLost):
            named = [int(number) for number in re.findall(r"rank (\d+)", str(outcome))]
            if not lost or not set(named) <= set(lost):
                return f"accused: rank {rank} says {outcome}, and {lost} were lost"
    if ENDS in outcomes:
        first = [sum(schedule.ranks_per_host[:host]) for host in range(len(schedule.ranks_per_host))]
        hosts = [range(at, at + count) for at, count in zip(first, schedule.ranks_per_host, strict=True)]
        left = [rank for rank in range(schedule.size) if rank not in lost]
        if has_quorum(hosts, left) or any(outcomes[rank] != ENDS for rank in left):
            return f"ended: {outcomes}"
    if schedule.recovers and DONE in outcomes:
        others = [outcome for outcome in outcomes if outcome not in (DONE, LOST)]
        if others:
            return f"alone: some have recovered, and others have not: {outcomes}"
    return ""


class LeftOver(NamedTuple):
    """What a process has of what no run may leave.

    Attributes:
        threads: their names.
        mappings: of shared memory.
    """

    threads: tuple[str, ...]
    mappings: int

    @classmethod
    def now(cls) -> "LeftOver":
        """Return what there is now."""
        for _ in range(COLLECTIONS):
            gc.collect()
        maps = Path("/proc/self/maps").read_text()
        names = sorted(thread.name for thread in threading.enumerate())
        return cls(tuple(names), maps.count(SHARED_MEMORY))


def run_schedules(seeds: range, *, writes: bool = False, max_faults: int = 20, shrink_runs: int = 150) -> int:
    """Run many, shrink and print those that went wrong, and return how many these were.

    Args:
        seeds: of them.
        writes: see `draw`.
        max_faults: after which nothing more is run.
        shrink_runs: how many are run at most to shrink one.
    """
    warnings.filterwarnings("ignore", ".*failed and nobody waited", RuntimeWarning)
    warnings.filterwarnings("ignore", ".*share a host but no memory", RuntimeWarning)
    began_s, wrong, num_losses, num_disk_faults, before = time.monotonic(), 0, 0, 0, LeftOver.now()
    for seed in seeds:
        schedule = draw(seed, writes=writes)
        num_losses += schedule.loss is not None
        num_disk_faults += any(fault.kind != ALLOCATE for fault in schedule.faults)
        said = check(schedule)
        if not said and (seed + 1) % LOOK_EVERY == 0 and (now := LeftOver.now()) != before:
            said, before = f"left over since seed {max(seeds[0], seed + 1 - LOOK_EVERY)}: {now}", now
            print(f"seed {seed}: {said}", flush=True)
            wrong += 1
        elif said:
            wrong += 1
            print(f"seed {seed}: {said}", flush=True)
            if said.startswith("TimeoutError"):
                break  # its threads are still there
            print(python_text(shrink(schedule, said, check, max_runs=shrink_runs)), flush=True)
        if wrong >= max_faults:
            break
    took_s = time.monotonic() - began_s
    rate = len(seeds) / took_s
    print(
        f"{len(seeds)} schedules, {num_losses} with a loss, {num_disk_faults} with a disk that fails, in "
        f"{took_s:.1f} s, {rate:.1f} per second; {wrong} failed",
        file=sys.stdout,
    )
    return wrong
