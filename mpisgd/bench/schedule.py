"""Whose turn it is, how many calls a turn has, and when to stop: the same decisions on every rank.

All variants have one turn in every round, so a machine that is busy for a while slows all of them alike.
Each round begins with another variant, since what ran before leaves its traces in the caches.

    round 0    mpisgd  MPI     gloo    limit      (not counted)
    round 1    MPI     gloo    limit   mpisgd
    round 2    gloo    limit   mpisgd  MPI
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

__all__ = ["Pace", "calls_per_turn", "goes_on", "turns"]

T = TypeVar("T")


@dataclass(frozen=True)
class Pace:
    """How long to measure.

    Attributes:
        rounds: that are counted, unless the budget ends them before.
        min_rounds: even where the budget is used up.
        budget_s: for all rounds of all variants of one case.
        turn_s: what the calls of one turn should take together.
        max_calls: of one turn.
    """

    rounds: int
    min_rounds: int
    budget_s: float
    turn_s: float
    max_calls: int


def turns(variants: Sequence[T], round_number: int) -> list[T]:
    """Return the order of one round."""
    if not variants:
        return []
    first = round_number % len(variants)
    return [*variants[first:], *variants[:first]]


def calls_per_turn(seconds: float, pace: Pace) -> int:
    """Return how many calls of `seconds` each make up a turn."""
    if seconds * pace.max_calls <= pace.turn_s:
        return pace.max_calls
    return max(1, round(pace.turn_s / seconds))


def goes_on(rounds_done: int, used_s: float, pace: Pace) -> bool:
    """Return whether there is another round. Depends only on what all ranks have agreed on."""
    if rounds_done < min(pace.min_rounds, pace.rounds):
        return True
    return rounds_done < pace.rounds and used_s < pace.budget_s
