"""The hang report: what all ranks of a job do, in words, and where those are for which the others wait."""

import functools
from collections import defaultdict
from collections.abc import Sequence
from typing import overload

from mpisgd.arguments import ranks_text
from mpisgd.monitor.rank_state import LEFT, RUNS, WAITS, RankState, Wait, group_key

__all__ = [
    "Survey",
    "activity",
    "failed_thread_lines",
    "for_whom",
    "hang_report",
    "main_wait",
    "missing",
    "place",
]

MAX_STACKS = 6
MAX_LINES = 28  # of a stack; the innermost calls are kept


def main_wait(state: RankState) -> Wait | None:
    """Return the wait that keeps a rank: its main thread's, or the one that this one waits for."""
    timed = [wait for wait in state.waits if wait.timeout_s is not None or wait.mpi_call]
    own = [wait for wait in timed if wait.is_main] or timed or list(state.waits)
    return own[0] if own else None


class Survey(Sequence[RankState]):
    """The states of ranks, and what was found in them: most ranks wait for the same.

    Args:
        states: of different ranks.
    """

    def __init__(self, states: Sequence[RankState]) -> None:
        self._states = list(states)
        self._by_rank = {state.rank: state for state in states}
        self._missing: dict[object, tuple[int, ...]] = {}
        self._texts: dict[object, tuple[frozenset[int], str]] = {}

    def __len__(self) -> int:
        return len(self._states)

    @overload
    def __getitem__(self, place: int) -> RankState: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[RankState]: ...
    def __getitem__(self, place: int | slice) -> RankState | Sequence[RankState]:
        return self._states[place]

    def missing(self, wait: Wait) -> tuple[int, ...]:
        """Return the ranks without which a wait does not end; see the function `missing`."""
        if wait.message is not None:
            return tuple(wait.message.partners)
        if wait.awaited or not self._states:
            return tuple(wait.awaited)
        key = _what_is_awaited(wait)
        if key not in self._missing:
            self._missing[key] = tuple(self._late(wait))
        return self._missing[key]

    def _late(self, wait: Wait) -> list[int]:
        by_rank = self._by_rank
        known = [rank for rank in wait.members if rank in by_rank]
        if wait.number:
            key = group_key(wait.members, wait.ordinal)
            late = [rank for rank in known if by_rank[rank].num_begun.get(key, 0) < wait.number]
        else:
            late = [rank for rank in known if not wait.is_shared_by(by_rank[rank])]
        return late or [rank for rank in known if by_rank[rank].state not in (RUNS, WAITS)]

    def for_whom(self, wait: Wait, rank: int) -> str:
        """Return ` for ranks 1, 2`, those that `rank` waits for; see the function `for_whom`."""
        late = self.missing(wait)
        if not late:
            return ""
        key = _what_is_awaited(wait)
        if key not in self._texts:
            self._texts[key] = frozenset(late), f" for {ranks_text(late)}"
        ranks, text = self._texts[key]
        if rank not in ranks:
            return text
        others = [other for other in late if other != rank]
        return f" for {ranks_text(others)}" if others else ""

    @functools.cached_property
    def late_in(self) -> dict[int, set[str]]:
        """By rank, the operations of others to which it has not come."""
        found: dict[int, set[str]] = defaultdict(set)
        for wait in {(wait.group, _what_is_awaited(wait)): wait for wait in self._waits()}.values():
            if wait.number:
                for rank in self.missing(wait):
                    found[rank].add(f"operation {wait.number} of group '{wait.group}'")
        return found

    def wanted(self) -> set[int]:
        """Return the ranks without which some rank does not go on."""
        late = {id(ranks): ranks for ranks in map(self.missing, self._waits())}
        return {rank for ranks in late.values() for rank in ranks}

    def _waits(self) -> list[Wait]:
        return [wait for wait in map(main_wait, self._states) if wait is not None]


def _what_is_awaited(wait: Wait) -> object:
    """Return a key that waits for the same ranks share; members by their place in memory."""
    return wait.message, wait.awaited, id(wait.members), wait.number, wait.ordinal, wait.what


def _survey(states: Sequence[RankState]) -> Survey:
    return states if isinstance(states, Survey) else Survey(states)


def missing(wait: Wait, states: Sequence[RankState]) -> list[int]:
    """Return the global ranks without which a wait does not end: who has not come, or does not answer.

    Of ranks without a state nothing is said.
    """
    return list(_survey(states).missing(wait))


def for_whom(wait: Wait, rank: int, states: Sequence[RankState]) -> str:
    """Return ` for ranks 1, 2`, those that `rank` waits for; "" where that is not known."""
    return _survey(states).for_whom(wait, rank)


def place(wait: Wait) -> str:
    """Return which operation of which group a wait is in, and where the program called it."""
    parts = [wait.what]
    if wait.group:
        operation = f"operation {wait.number} of " if wait.number else ""
        parts.append(f"{operation}group '{wait.group}'")
    if wait.mpi_call:
        parts.append(f"inside MPI's {wait.mpi_call}")
    if wait.site:
        parts.append(f"at {wait.site}")
    return ", ".join(parts)


def hang_report(states: Sequence[RankState]) -> str:
    """Return the report: a row for each rank, alike ones together, and the stacks of the missing ones."""
    rows: dict[tuple[str, str], list[RankState]] = defaultdict(list)
    states = Survey(states)
    for state in states:
        rows[state.host, activity(state, states)].append(state)
    cells = [("ranks", "host", "for", "what they do")]
    for (host, text), alike in rows.items():
        waited = [wait.waited_s for wait in filter(None, map(main_wait, alike))]
        since = f"{max(waited):.1f} s" if waited else ""
        cells.append((ranks_text([state.rank for state in alike]).partition(" ")[2], host, since, text))
    a, b, c = (max(len(row[i]) for row in cells) for i in range(3))
    table = [f"  {ranks:{a}}  {host:{b}}  {since:{c}}  {text}".rstrip() for ranks, host, since, text in cells]
    return "\n".join([*table, *failed_thread_lines(states), *_stacks(states)])


def failed_thread_lines(states: Sequence[RankState]) -> list[str]:
    """Return a line for each thread that an error has ended: what it did not do others may wait for."""
    return [f"  rank {state.rank}: {failed}" for state in states for failed in state.failed_threads]


def activity(state: RankState, states: Sequence[RankState]) -> str:
    """Describe what a rank does, in one line."""
    wait = main_wait(state)
    if wait is not None:
        return f"waits{for_whom(wait, state.rank, states)}: {place(wait)}"
    if state.state != RUNS:
        return "has left the job" if state.state == LEFT else f"{state.note} (process {state.pid})"
    late = _survey(states).late_in.get(state.rank, set())
    return f"runs code outside mpisgd{', has not come to ' if late else ''}{', '.join(sorted(late))}"


def _stacks(states: Survey) -> list[str]:
    """Return where the missing ranks are, those that do not wait themselves first."""
    wanted = states.wanted()
    by_stack: dict[tuple[str, str], list[int]] = defaultdict(list)
    for state in sorted(states, key=lambda state: state.state == WAITS):
        if state.rank in wanted and state.stacks:
            by_stack[next(iter(state.stacks.items()))].append(state.rank)
    lines = []
    for (name, stack), ranks in list(by_stack.items())[:MAX_STACKS]:
        order = name if "innermost" in name else "the innermost call last"
        lines.append(f"  {ranks_text(ranks)} {'are' if len(ranks) > 1 else 'is'} here ({order}):")
        lines += [f"    {line}" for line in _shortened(stack, "innermost call first" in name)]
    return lines + ["  ... and others elsewhere"] * (len(by_stack) > MAX_STACKS)


def _shortened(stack: str, innermost_first: bool) -> list[str]:
    lines = stack.rstrip().splitlines()
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[:MAX_LINES], "..."] if innermost_first else ["...", *lines[-MAX_LINES:]]
