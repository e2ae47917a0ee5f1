"""`with_losses`: a program with commits in it, and a loss of a rank or of a host, or two."""

import random
from dataclasses import replace

from mpisgd.tools.verification.programs.contract import violation
from mpisgd.tools.verification.programs.events import Broadcast, Commit, Event, Lose
from mpisgd.tools.verification.programs.lost_ranks import NOT_UNDONE
from mpisgd.tools.verification.programs.program import Program

TRIES = 20
LATE_SHARE = 0.5  # of the losses that come in the middle of something
HOST_SHARE = 0.3  # of those that are of a host, where there are several
LARGEST_WAIT = 300  # an event takes between none and some hundred waits and messages


def loses(seed: int, share: float) -> bool:
    """Return whether the program of a seed is one of this share that have losses."""
    return random.Random(f"loses {seed}").random() < share


def with_losses(program: Program) -> Program:
    """Return a program with losses, drawn from its seed; the program itself where it can have none."""
    chance = random.Random(f"losses {program.seed}")
    if program.ranks == 1 or program.is_resized:
        return program
    kept = tuple(event for event in program.events if not isinstance(event, Broadcast))
    for _ in range(TRIES):
        drawn = replace(program, events=_events(chance, replace(program, events=kept)))
        if drawn.loses and not violation(drawn):
            return drawn
    return program


def _events(chance: random.Random, program: Program) -> tuple[Event, ...]:
    number = 2 if program.ranks > 2 and chance.random() < 0.3 else 1
    places = sorted(chance.randrange(len(program.events) + 1) for _ in range(number))
    events: list[Event] = []
    for place, event in enumerate((*program.events, None)):
        for _ in range(places.count(place)):
            events.append(_loss(chance, program))
        if isinstance(event, NOT_UNDONE) and places.count(place):
            events.append(Commit())  # where the others notice it
        if event is not None:
            events.append(event)
            if isinstance(event, NOT_UNDONE):
                events += [Commit(), Commit()]
            elif chance.random() < 0.25:
                events.append(Commit())
    return tuple(events)


def _loss(chance: random.Random, program: Program) -> Lose:
    ranks, each = program.ranks, program.ranks_per_host
    gone = [chance.randrange(ranks)]
    if each and chance.random() < HOST_SHARE:
        first = gone[0] // each * each
        gone = list(range(first, min(first + each, ranks)))
    elif ranks > 2 and chance.random() < 0.15:
        gone = chance.sample(range(ranks), 2)
    waits = int(LARGEST_WAIT ** chance.random()) if chance.random() < LATE_SHARE else 0
    return Lose(tuple(gone), waits)
