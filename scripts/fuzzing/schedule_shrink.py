"""A schedule that fails is reduced to fewer acts, ranks and draws, and printed as a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fuzzing.schedule import WORLD, Act, Schedule

__all__ = ["python_text", "shrink"]

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
