"""Programs in which ranks are lost: what of it comes to the same without a loss, and the rules of such ones.

The others go back to a commit, without gradients, and do again what came after it, without those that were
lost. Which commit that is depends on how far each had come, so a `Resumption` is what they have seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpisgd.tools.verification.programs.events import (
    AddGroup,
    Backward,
    Broadcast,
    Commit,
    Convert,
    Event,
    Lose,
    Reload,
)
from mpisgd.tools.verification.programs.program import Program

__all__ = ["NOT_UNDONE", "Resumption", "lost_in", "resumed_at", "violation_of_losses", "without_losses"]

NOT_UNDONE = (AddGroup, Convert, Reload)  # what an older commit cannot bring back


class Resumption(NamedTuple):
    """Where the others go on after a loss.

    Attributes:
        position: of the first event that they do again; that of the commit they go back to, and one more.
        left: who they are, as they were numbered at the beginning.
    """

    position: int
    left: tuple[int, ...]


def lost_in(program: Program) -> set[int]:
    """Return all ranks that are lost."""
    return {rank for event in program.events if isinstance(event, Lose) for rank in event.ranks}


def without_losses(program: Program, resumptions: Sequence[Resumption] = ()) -> Program:
    """Return a program without losses and commits; where the others go on, all gradients are dropped.

    Args:
        program: with losses.
        resumptions: in their order.
    """
    positions = {each.position for each in resumptions}
    events: list[Event] = []
    for position, event in enumerate(program.events):
        if position in positions:
            events.append(Reload())
        if not isinstance(event, Commit | Lose):
            events.append(event)
    return replace(program, events=tuple(events))


def violation_of_losses(program: Program) -> str:
    """Return which rule of losses a program breaks, "" if none. `without_losses` must break none, either."""
    gone = lost_in(program)
    left = set(range(program.ranks)) - gone
    if any(rank >= program.ranks for rank in gone) or not left:
        return "no such rank is lost, or nobody is left"
    if any(isinstance(event, Lose) and not event.ranks for event in program.events):
        return "a loss of nobody"
    if program.is_resized:
        return "groups of some ranks are not made again"
    if any(isinstance(event, Broadcast) for event in program.events):
        return "who sends may be lost"
    if program.is_uneven:
        return "join() is a block, which is left by the error and not begun in the middle"
    if any(isinstance(event, Backward) and left <= set(event.skipped) for event in program.events):
        return "a backward of nobody that is left"
    return _not_undone(program)


def _not_undone(program: Program) -> str:
    """Return whether a commit that ranks may go back to is older than what it cannot bring back.

    A rank that is lost right after a commit may have left others in the middle of it, who go back to the one
    before. One that is lost later may be lost anywhere.
    """
    num_commits, may_be_lost, is_noticed = 2, False, True
    for event in program.events:
        match event:
            case Commit():
                num_commits += 1
                is_noticed = True
            case Lose(waits=waits):
                if num_commits < 2:
                    return f"{event}: two commits before it must be younger than what they cannot bring back"
                may_be_lost |= waits > 0
                is_noticed = False
            case _ if isinstance(event, NOT_UNDONE):
                if may_be_lost or not is_noticed:
                    return f"{event}: ranks may be lost in it"
                num_commits = 0
    return ""


def resumed_at(program: Program) -> Iterator[Program]:
    """Yield what a program may come to without losses."""
    yield without_losses(program)
    left = tuple(sorted(set(range(program.ranks)) - lost_in(program)))
    for position in (0, *(at + 1 for at, event in enumerate(program.events) if isinstance(event, Commit))):
        yield without_losses(program, [Resumption(position, left)])
