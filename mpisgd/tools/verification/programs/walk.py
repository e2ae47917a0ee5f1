"""`Walk`: what has happened up to an event of a program, which the rules of the contract look at."""

from __future__ import annotations

from dataclasses import dataclass, field

from mpisgd.tools.verification.programs.events import SetFrozen
from mpisgd.tools.verification.programs.program import Program

__all__ = ["Walk", "Window", "anchors", "begin", "trains_locally"]


@dataclass
class Window:
    """What has happened since the last step or reset of the gradients by an optimizer.

    Attributes:
        passes: backward passes that count.
        has_skips: whether a rank was without one.
        is_settled: whether gradients were reduced by `synchronize()` or clipping, or before this window by a
            backward whose step a scaler has left out: the optimizer was told of no step, and of no reset.
        is_reduced: whether all gradients of all ranks are reduced now.
        has_ended: whether a backward has filled a window on some rank.
    """

    passes: int = 0
    has_skips: bool = False
    is_settled: bool = False
    is_reduced: bool = False
    has_ended: bool = False


@dataclass
class Walk:
    """What has happened so far to a program, of which its rules are told event by event."""

    program: Program
    layers: set[int] = field(default_factory=set)
    window: Window = field(default_factory=Window)
    is_clipped: bool = False  # since the last reset
    is_stepped: bool = False  # with clipped gradients
    is_set: bool = False  # a gradient, by the program, since the last reset
    awaits_closure: bool = False  # since that was not reduced
    is_reduced: bool = False  # what there is, and not reset since; on some rank
    adds: bool = False  # something was added to that
    num_ranks: int = 0  # that train now
    has_begun: bool = False  # and so has the state of optimizers
    has_gradients: bool = False  # which a scaler has not divided yet
    overflows: bool = False  # some of what there is
    is_unscaled: bool = False  # it has
    was_stepped: bool = False  # with those
    with_data: set[int] = field(default_factory=set)  # inside `join()`
    ran_out: bool = False  # some rank, inside the latest `join()`
    is_empty: bool = True  # no parameter has a gradient
    is_rate_new: bool = False  # on ranks with data, which have not stepped since
    is_stale: bool = False  # what ranks that ran out have as gradients, where they train by themselves


def begin(program: Program) -> Walk:
    """Return the walk of a program before its first event."""
    layers = {layer for optimizer in program.optimizers for layer in optimizer.layers}
    return Walk(program, layers, num_ranks=program.ranks)


def anchors(program: Program, layers: tuple[int, ...]) -> list[int]:
    """Return the layers whose gradient every backward of every rank computes."""
    refrozen = {event.layer for event in program.events if isinstance(event, SetFrozen)}
    return [
        place
        for place in layers
        if place < len(program.layers)
        and program.layers[place].used_by == "all"
        and not program.layers[place].frozen
        and place not in refrozen
    ]


def trains_locally(program: Program) -> bool:
    """Return whether ranks step with gradients of their own."""
    strategies = [optimizer.option("strategy", "mpisgd.Synchronous()") for optimizer in program.optimizers]
    return not all("Synchronous" in each or "Sharded" in each for each in strategies)
