"""`DeadlockDetector`: ends waits that can never end otherwise, on all ranks that have them, within seconds.

A rank is able to move when its program runs, or when one of its waits can end by what able ranks do. Start
with those that run; whoever is left when nobody can be added waits for ranks that wait themselves, or that
have come to their end (`stuck_ranks`):

    rank 0   waits in group A, operation 7, for rank 1    (rank 1 has begun 6 operations of A)
    rank 1   waits in group B, operation 3, for rank 0    (rank 0 has begun 2 operations of B)
    rank 2   runs its own code: able, but it is not what they wait for

In doubt a rank is able: one that does not answer, a wait of which too little is known or which has a limit
of its own, a thread of the user's that may communicate (`idle_threads`), a transfer for which both sides are
there and which may only be slow.

A rank that has waited for a while asks what all others do; of the ranks of a host the lowest that waits does.
When it finds ranks that can never go on, and the same ones unmoved a second later, it sends them a notice:
each ends its wait with a `Deadlock`. While all others are asked at different moments, nobody among those that
are stuck can have moved, since only they could move each other.
"""

import json
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from mpisgd.arguments import ranks_text
from mpisgd.errors import Deadlock
from mpisgd.monitor.hang_report import Survey, failed_thread_lines, for_whom, place
from mpisgd.monitor.mailbox_pages import NOTICE_BYTES
from mpisgd.monitor.rank_state import LEFT, WAITS, RankState, Wait, group_key
from mpisgd.monitor.state_collector import StateCollector
from mpisgd.threads import wait_registry
from mpisgd.threads.wait_registry import Message

__all__ = ["DeadlockDetector", "describe_deadlock", "encode_notice", "fingerprint", "stuck_ranks"]

FIRST_S = 2.0  # who has waited so long asks what the others do
SURE_S = 1.0  # between the two times
VALID_S = 10.0  # a notice about waits that have not been seen again by then is void
# Long waits are ordinary where one rank evaluates or saves: then it is asked less and less often.
BACKOFF = 1.5
MAX_LINES = 64  # of a report of a deadlock: every rank that it is told to gets all of them


class _Condition:
    """What ends a wait: that so many of some ranks are able; it may end several waits.

    Attributes:
        ranks: these.
        left: how many more of them have to be.
        frees: whose waits it ends.
    """

    def __init__(self, ranks: Collection[int], left: int) -> None:
        self.ranks = ranks
        self.left = left
        self.frees: list[int] = []


def stuck_ranks(states: Sequence[RankState]) -> set[int]:
    """Return the ranks that can never go on, if nothing has changed by the time all states were taken."""
    known = {state.rank: state for state in states}
    able = {state.rank for state in states if state.state not in (WAITS, LEFT) or state.may_communicate}
    waiting = [state for state in states if state.state == WAITS and state.rank not in able]
    conditions: dict[object, _Condition] = {}
    for state in waiting:
        for wait in state.waits:
            key = _key_of(wait, state.rank)
            if key not in conditions:
                conditions[key] = _condition(wait, state.rank, known)
            conditions[key].frees.append(state.rank)
    needed_by: dict[int, list[_Condition]] = defaultdict(list)
    for condition in conditions.values():
        for rank in condition.ranks:
            needed_by[rank].append(condition)
    new = list(able)
    for condition in conditions.values():
        if condition.left == 0:
            new += condition.frees
    able.update(new)
    new = list(able)
    while new:
        for condition in needed_by.pop(new.pop(), ()):
            condition.left -= 1
            if condition.left == 0:
                freed = set(condition.frees) - able
                able |= freed
                new += freed
    return {state.rank for state in waiting} - able


def _key_of(wait: Wait, rank: int) -> object:
    """Return a key that waits share which the same event ends; members by their place in memory."""
    ends = bool(wait.mpi_call or wait.own_limit), wait.is_local
    if wait.message is not None:
        return *ends, rank, wait.message
    return *ends, wait.awaited, id(wait.members), wait.number, wait.ordinal, wait.what


def _condition(wait: Wait, rank: int, known: Mapping[int, RankState]) -> _Condition:
    """Return by which able ranks a wait of `rank` can end; of none, where it may end by itself."""
    if wait.mpi_call or wait.own_limit:
        return _Condition((), 0)
    if wait.message is not None:
        is_there = _is_there(wait.message, rank, known)
        return _Condition((), 0) if is_there else _Condition({*wait.message.partners}, 1)
    if wait.awaited:
        needed = {*wait.awaited}
    elif wait.number:
        key = group_key(wait.members, wait.ordinal)
        needed = {each for each in wait.members if known[each].num_begun.get(key, 0) < wait.number}
    elif wait.members:
        needed = {each for each in wait.members if not wait.is_shared_by(known[each])}
    elif wait.is_local:
        return _Condition((), 1)
    else:
        return _Condition((), 0)
    return _Condition(needed, len(needed))


def _is_there(message: Message, rank: int, known: Mapping[int, RankState]) -> bool:
    """Return whether some partner has the other end of a message."""
    other_end = message.group, message.tag, not message.receives
    return any(
        (other.group, other.tag, other.receives) == other_end and rank in other.partners
        for partner in message.partners
        for other in known[partner].messages
    )


def fingerprint(state: RankState) -> tuple[object, ...]:
    """Return the part of a state that changes as soon as a rank moves."""
    return state.progress, *sorted(wait.serial for wait in state.waits)


def describe_deadlock(states: Sequence[RankState], stuck: set[int]) -> str:
    """Say who waits where and for which ranks; of those that are able, what they do."""
    why = "they wait for each other, or for a rank that has ended its program"
    lines = [f"{ranks_text(stuck)} can never go on: {why}:"]
    states = Survey(states)
    for state in states:
        if len(lines) > MAX_LINES:
            lines.append("  ... and others")
            break
        if state.rank not in stuck:
            lines.append(f"  rank {state.rank} {'has left' if state.state == LEFT else state.state}")
            continue
        for wait in state.waits:
            if not wait.is_local:
                tag = f", tag {wait.message.tag}" if wait.message is not None else ""
                whom = for_whom(wait, state.rank, states)
                lines.append(f"  rank {state.rank} waits{whom} in {place(wait)}{tag}")
    return "\n".join([*lines, *failed_thread_lines(states)])


def encode_notice(text: str, serials: Sequence[tuple[int, Sequence[int]]]) -> bytes:
    """Return the notice of a deadlock, with as much of the text as there is room for.

    Args:
        text: for the error, in lines.
        serials: of the waits that are to end, by rank.
    """
    lines = text.splitlines()
    while len(notice := json.dumps(["\n".join(lines), serials]).encode()) > NOTICE_BYTES and len(lines) > 2:
        lines = [*lines[: len(lines) // 2], "  ... and others"]
    return notice


class DeadlockDetector:
    """The deadlock detector of one rank; works on the monitor's thread, which calls it about once a second.

    Args:
        collector: asks the others.
    """

    def __init__(self, collector: StateCollector) -> None:
        self._collector = collector
        self._since_s = 0.0  # when the wait began that is being examined
        self._next_s = FIRST_S
        self._notices: list[tuple[float, bytes]] = []  # with when they came
        self._suspects: dict[int, tuple[object, ...]] = {}

    def check(self) -> None:
        """See whether it is time to ask, and what others have found."""
        self._notices += [(time.monotonic(), text) for text in self._collector.notices()]
        self._carry_out_notices()
        longest = next(iter(wait_registry.registered()), None)
        if longest is None:
            return
        if longest.since_s != self._since_s:
            self._since_s, self._next_s, self._suspects = longest.since_s, FIRST_S, {}
        waited_s = time.monotonic() - longest.since_s
        if waited_s < self._next_s:
            return
        here = [state.rank for state in self._collector.collect_host() if state.state == WAITS]
        if min(here, default=self._collector.rank) >= self._collector.rank:  # no lower one waits, too
            self._next_s = max(waited_s + SURE_S, waited_s * BACKOFF)
            self._analyse()

    def _analyse(self) -> None:
        states = self._collector.collect()
        stuck = stuck_ranks(states)
        suspects = {state.rank: fingerprint(state) for state in states if state.rank in stuck}
        before, self._suspects = self._suspects, suspects
        if not stuck:
            return
        if any(before.get(rank) != suspects[rank] for rank in stuck):
            self._next_s = time.monotonic() - self._since_s + SURE_S  # seen for the first time
            return
        text = describe_deadlock(states, stuck)
        for domain in self._collector.domains:  # each is told of its own ranks' waits alone
            here = stuck.intersection(domain)
            serials = [(rank, [wait.serial for wait in states[rank].waits]) for rank in sorted(here)]
            notice = encode_notice(text, serials)
            self._collector.notify(notice, here - {self._collector.rank})
            if self._collector.rank in here:
                self._notices.append((time.monotonic(), notice))
        self._carry_out_notices()

    def _carry_out_notices(self) -> None:
        """Carry out what can be now: a thread that waits may be awake for a moment."""
        since_s = time.monotonic() - VALID_S
        self._notices = [
            (came_s, text) for came_s, text in self._notices if came_s > since_s and not self._carry_out(text)
        ]

    def _carry_out(self, notice: bytes) -> bool:
        """End this rank's waits, if they are those that the notice is about; return whether that is done."""
        text, serials_by_rank = json.loads(notice)
        serials = set(dict(serials_by_rank).get(self._collector.rank, ()))
        # There may be others by now: who has had the notice before does something else already.
        registered = wait_registry.registered()
        calls = dict(wait_registry.mpi_calls).values()
        in_mpi = {wait_registry.serial_of(since_s) for _, since_s in calls}
        if not serials <= in_mpi | {wait.serial for wait in registered}:
            return False
        threads = {wait.thread for wait in registered if wait.serial in serials}
        for wait in registered:
            if wait.thread in threads:
                wait_registry.cancel(wait, Deadlock(text))
        return True
