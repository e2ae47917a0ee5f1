"""The report: what all ranks of a job do, in words, and where those are for whom the others wait."""

from collections import defaultdict
from collections.abc import Sequence

from mpisgd.monitor.rank_snapshot import group_key
from mpisgd.monitor.rank_state import LEFT, RUNS, WAITS, RankState, Wait

__all__ = ["main_wait", "missing", "place", "ranks_text", "table"]

MOST_STACKS = 6
MOST_LINES = 28  # of a stack; the innermost calls are kept
MOST_RANKS = 12


def ranks_text(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2`; of many, the first ones."""
    shown = ", ".join(map(str, sorted(ranks)[:MOST_RANKS]))
    more = f" and {len(ranks) - MOST_RANKS} more" if len(ranks) > MOST_RANKS else ""
    return f"rank{'s' * (len(ranks) != 1)} {shown}{more}"


def main_wait(view: RankState) -> Wait | None:
    """Return the wait that keeps a rank: its main thread's, or the one that this one waits for."""
    limited = [wait for wait in view.waits if wait.limit_s is not None or wait.inside]
    own = [wait for wait in limited if wait.main] or limited or list(view.waits)
    return own[0] if own else None


def missing(wait: Wait, views: Sequence[RankState]) -> list[int]:
    """Return the global ranks without which a wait does not end: who has not come, or does not answer."""
    by_rank = {view.rank: view for view in views}
    if wait.whom:
        return list(wait.whom)
    if wait.number:
        key = group_key(wait.members, wait.ordinal)
        late = [rank for rank in wait.members if by_rank[rank].numbers.get(key, 0) < wait.number]
    else:
        late = [rank for rank in wait.members if not _waits_likewise(by_rank[rank], wait)]
    return late or [rank for rank in wait.members if by_rank[rank].state not in (RUNS, WAITS)]


def _waits_likewise(view: RankState, wait: Wait) -> bool:
    return any((other.what, other.members) == (wait.what, wait.members) for other in view.waits)


def place(wait: Wait) -> str:
    """Return which operation of which group a wait is in, and where the program called it."""
    parts = [wait.what]
    if wait.group:
        parts.append(
            f"operation {wait.number} of group '{wait.group}'" if wait.number else f"group '{wait.group}'"
        )
    if wait.inside:
        parts.append(f"inside MPI's {wait.inside}")
    if wait.site:
        parts.append(f"at {wait.site}")
    return ", ".join(parts)


def table(views: Sequence[RankState]) -> str:
    """Return the report: a row for each rank, alike ones together, and the stacks of the missing ones."""
    rows: dict[tuple[str, str], list[RankState]] = defaultdict(list)
    for view in views:
        rows[view.host, _does(view, views)].append(view)
    cells = [("ranks", "host", "for", "what they do")]
    for (host, text), alike in rows.items():
        waited = [wait.waited_s for view in alike if (wait := main_wait(view)) is not None]
        since = f"{max(waited):.1f} s" if waited else ""
        cells.append((ranks_text([view.rank for view in alike]).partition(" ")[2], host, since, text))
    widths = [max(len(row[i]) for row in cells) for i in range(3)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True)), row[3]])
        for row in cells
    ]
    return "\n".join([*(f"  {line.rstrip()}" for line in lines), *_stacks(views)])


def _does(view: RankState, views: Sequence[RankState]) -> str:
    wait = main_wait(view)
    if wait is not None:
        whom = [rank for rank in missing(wait, views) if rank != view.rank]
        return f"waits{' for ' + ranks_text(whom) if whom else ''}: {place(wait)}"
    if view.state == RUNS:
        return f"in code of its own{_behind(view, views)}"
    return "has left the job" if view.state == LEFT else f"{view.note} (process {view.pid})"


def _behind(view: RankState, views: Sequence[RankState]) -> str:
    """Say which operations that others wait in a rank has not come to."""
    waits = [wait for other in views if (wait := main_wait(other)) is not None]
    late = {
        f"operation {wait.number} of group '{wait.group}'"
        for wait in waits
        if wait.number and view.rank in missing(wait, views)
    }
    return f", has not come to {', '.join(sorted(late))}" if late else ""


def _stacks(views: Sequence[RankState]) -> list[str]:
    """Return where the missing ranks are, those that do not wait themselves first."""
    waits = [wait for view in views if (wait := main_wait(view)) is not None]
    wanted = {rank for wait in waits for rank in missing(wait, views)}
    by_stack: dict[tuple[str, str], list[int]] = defaultdict(list)
    for view in sorted(views, key=lambda view: view.state == WAITS):
        if view.rank in wanted and view.stacks:
            by_stack[next(iter(view.stacks.items()))].append(view.rank)
    lines = []
    for (name, stack), ranks in list(by_stack.items())[:MOST_STACKS]:
        order = name if "innermost" in name else "the innermost call last"
        lines.append(f"  {ranks_text(ranks)} {'are' if len(ranks) > 1 else 'is'} here ({order}):")
        lines += [f"    {line}" for line in _shortened(stack, "innermost call first" in name)]
    return lines + ["  ... and others elsewhere"] * (len(by_stack) > MOST_STACKS)


def _shortened(stack: str, innermost_first: bool) -> list[str]:
    lines = stack.rstrip().splitlines()
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[:MOST_LINES], "..."] if innermost_first else ["...", *lines[-MOST_LINES:]]
