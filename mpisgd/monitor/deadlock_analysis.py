"""Who can never go on: found from the views of all ranks, with no more than what these tell.

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

from mpisgd.monitor.hang_report import missing, place, ranks_text
from mpisgd.monitor.rank_snapshot import group_key
from mpisgd.monitor.rank_state import LEFT, WAITS, Message, RankState, Wait

__all__ = ["describe_stuck", "state_of", "stuck_ranks"]


def stuck_ranks(views: Sequence[RankState]) -> set[int]:
    """Return the ranks that can never go on, if nothing has changed by the time all views were taken."""
    known = {view.rank: view for view in views}
    able = {view.rank for view in views if view.state not in (WAITS, LEFT) or view.is_free}
    while True:
        more = {
            view.rank
            for view in views
            if view.state == WAITS
            and view.rank not in able
            and any(_can_end(wait, view.rank, known, able) for wait in view.waits)
        }
        if not more:
            return {view.rank for view in views if view.state == WAITS} - able
        able |= more


def _can_end(wait: Wait, rank: int, known: Mapping[int, RankState], able: set[int]) -> bool:
    """Return whether able ranks, or nobody at all, can end a wait of `rank`."""
    if wait.inside:
        return True
    if wait.message is not None:
        return _can_arrive(wait.message, rank, known, able)
    if wait.whom:
        return all(member in able for member in wait.whom)
    if wait.number:
        return all(_has_come(known[member], wait) or member in able for member in wait.members)
    if wait.members:
        return all(_waits_likewise(known[member], wait) or member in able for member in wait.members)
    return not wait.own


def _has_come(view: RankState, wait: Wait) -> bool:
    return view.numbers.get(group_key(wait.members, wait.ordinal), 0) >= wait.number


def _waits_likewise(view: RankState, wait: Wait) -> bool:
    return any((other.what, other.members) == (wait.what, wait.members) for other in view.waits)


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


def state_of(view: RankState) -> tuple[object, ...]:
    """Return what must be the same in two views of a rank that has not moved in between."""
    return view.moves, *sorted(wait.serial for wait in view.waits)


def describe_stuck(views: Sequence[RankState], stuck: set[int]) -> str:
    """Say who waits where and for whom; of those that are able, what they do."""
    lines = [
        f"{ranks_text(sorted(stuck))} can never go on, since each waits for another or for one at its end:"
    ]
    for view in views:
        if view.rank in stuck:
            lines += [
                f"  rank {view.rank} {_text_of(wait, view, views)}" for wait in view.waits if not wait.own
            ]
        else:
            lines.append(f"  rank {view.rank} {'has left' if view.state == LEFT else view.state}")
    return "\n".join(lines)


def _text_of(wait: Wait, view: RankState, views: Sequence[RankState]) -> str:
    late = wait.message.partners if wait.message is not None else missing(wait, views)
    whom = [rank for rank in late if rank != view.rank]
    tag = f", tag {wait.message.tag}" if wait.message is not None else ""
    return f"waits for {ranks_text(whom)} in {place(wait)}{tag}"
