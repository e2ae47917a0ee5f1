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
from collections.abc import Mapping, Sequence

from mpisgd.arguments import ranks_text
from mpisgd.errors import Deadlock
from mpisgd.monitor.hang_report import failed_thread_lines, for_whom, place
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


def stuck_ranks(states: Sequence[RankState]) -> set[int]:
    """Return the ranks that can never go on, if nothing has changed by the time all states were taken."""
    known = {state.rank: state for state in states}
    able = {state.rank for state in states if state.state not in (WAITS, LEFT) or state.may_communicate}
    while True:
        more = {
            state.rank
            for state in states
            if state.state == WAITS
            and state.rank not in able
            and any(_can_end(wait, state.rank, known, able) for wait in state.waits)
        }
        if not more:
            return {state.rank for state in states if state.state == WAITS} - able
        able |= more


def _can_end(wait: Wait, rank: int, known: Mapping[int, RankState], able: set[int]) -> bool:
    """Return whether able ranks, or nobody at all, can end a wait of `rank`."""
    if wait.mpi_call or wait.own_limit:
        return True
    if wait.message is not None:
        return _can_arrive(wait.message, rank, known, able)
    if wait.awaited:
        return able.issuperset(wait.awaited)
    if wait.number:
        key = group_key(wait.members, wait.ordinal)
        come = {member for member in wait.members if known[member].num_begun.get(key, 0) >= wait.number}
        return able >= {*wait.members} - come
    if wait.members:
        return all(wait.is_shared_by(known[member]) or member in able for member in wait.members)
    return not wait.is_local


def _can_arrive(message: Message, rank: int, known: Mapping[int, RankState], able: set[int]) -> bool:
    """Return whether some partner has the other end of a message, or is able to come to it."""
    other_end = message.group, message.tag, not message.receives
    return not able.isdisjoint(message.partners) or any(
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
    for state in states:
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
        serials = [(rank, [wait.serial for wait in states[rank].waits]) for rank in stuck]
        text = encode_notice(describe_deadlock(states, stuck), serials)
        self._collector.notify(text, stuck - {self._collector.rank})
        self._notices.append((time.monotonic(), text))
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
