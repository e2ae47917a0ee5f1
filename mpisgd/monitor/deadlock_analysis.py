"""Who can never go on: found from the states of all ranks, with no more than what these tell.

A rank is able to move when its program runs, or when one of its waits can end by what able ranks do. Start
with those that run; whoever is left when nobody can be added waits for ranks that wait themselves, or that
have come to their end:

    rank 0   waits in group A, operation 7, for rank 1    (rank 1 has begun 6 operations of A)
    rank 1   waits in group B, operation 3, for rank 0    (rank 0 has begun 2 operations of B)
    rank 2   runs its own code: able, but it is not what they wait for

In doubt a rank is able: one that does not answer, a wait of which too little is known, a thread of the user's
that communicates, a transfer for which both sides are there and which may only be slow.
"""

from collections.abc import Mapping, Sequence

from mpisgd.arguments import ranks_text
from mpisgd.core.wait_registry import Message
from mpisgd.monitor.hang_report import failed_thread_lines, missing, place
from mpisgd.monitor.rank_state import LEFT, WAITS, RankState, Wait, group_key

__all__ = ["describe_deadlock", "fingerprint", "stuck_ranks"]


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
    if wait.mpi_call:
        return True
    if wait.message is not None:
        return _can_arrive(wait.message, rank, known, able)
    if wait.awaited:
        return all(member in able for member in wait.awaited)
    if wait.number:
        return all(_has_come(known[member], wait) or member in able for member in wait.members)
    if wait.members:
        return all(wait.is_shared_by(known[member]) or member in able for member in wait.members)
    return not wait.is_local


def _has_come(state: RankState, wait: Wait) -> bool:
    return state.num_begun.get(group_key(wait.members, wait.ordinal), 0) >= wait.number


def _can_arrive(message: Message, rank: int, known: Mapping[int, RankState], able: set[int]) -> bool:
    """Return whether some partner has the other end of a message, or is able to come to it."""
    return any(
        partner in able or any(_fit(message, rank, other, partner) for other in known[partner].messages)
        for partner in message.partners
    )


def _fit(message: Message, rank: int, other: Message, partner: int) -> bool:
    return (
        message.receives != other.receives
        and (message.group, message.tag) == (other.group, other.tag)
        and partner in message.partners
        and rank in other.partners
    )


def fingerprint(state: RankState) -> tuple[object, ...]:
    """Return what is the same in two states of a rank that has not moved in between."""
    return state.progress, *sorted(wait.serial for wait in state.waits)


def describe_deadlock(states: Sequence[RankState], stuck: set[int]) -> str:
    """Say who waits where and for which ranks; of those that are able, what they do."""
    lines = [
        f"{ranks_text(sorted(stuck))} can never go on, since each waits for another or for one at its end:"
    ]
    for state in states:
        if state.rank in stuck:
            lines += [
                f"  rank {state.rank} {_text_of(wait, state, states)}"
                for wait in state.waits
                if not wait.is_local
            ]
        else:
            lines.append(f"  rank {state.rank} {'has left' if state.state == LEFT else state.state}")
    return "\n".join([*lines, *failed_thread_lines(states)])


def _text_of(wait: Wait, state: RankState, states: Sequence[RankState]) -> str:
    late = wait.message.partners if wait.message is not None else missing(wait, states)
    others = [rank for rank in late if rank != state.rank]
    tag = f", tag {wait.message.tag}" if wait.message is not None else ""
    return f"waits for {ranks_text(others)} in {place(wait)}{tag}"
