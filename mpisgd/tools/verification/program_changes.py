"""Changes of a program, of which situations are made: an event more, another pass, an option."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from mpisgd.tools.verification.programs.events import Backward, Event, Step
from mpisgd.tools.verification.programs.program import Layer, Program

__all__ = [
    "Change",
    "after_step",
    "among_several",
    "before_steps",
    "change_backward",
    "each_event",
    "of_dense",
    "with_layer",
    "with_optimizer",
    "with_option",
]

Change = Callable[[Program], Program | None]


def after_step(program: Program, number: int, *events: Event) -> Program:
    """Return the program in which something happens after one of its steps, numbered from 0."""
    place = [i for i, event in enumerate(program.events) if isinstance(event, Step)][number] + 1
    return replace(program, events=(*program.events[:place], *events, *program.events[place:]))


def each_event(program: Program, kind: type, change: Callable[[Event], Sequence[Event]]) -> Program:
    """Return the program in which each event of a kind has become others."""
    changed = [change(event) if isinstance(event, kind) else (event,) for event in program.events]
    return replace(program, events=tuple(event for events in changed for event in events))


def before_steps(*events: Event) -> Change:
    """Have events happen before each step."""
    return lambda program: each_event(program, Step, lambda step: (*events, step))


def change_backward(number: int, change: Callable[[Backward, Program], Event | None]) -> Change:
    """Change one of the backward passes, numbered from 0; None takes it away."""

    def changed(program: Program) -> Program | None:
        events = list(program.events)
        places = [i for i, event in enumerate(events) if isinstance(event, Backward) and not event.no_sync]
        if len(places) <= number:
            return None
        backward = events[places[number]]
        assert isinstance(backward, Backward)
        other = change(backward, program)
        events[places[number] : places[number] + 1] = [] if other is None else [other]
        return replace(program, events=tuple(events))

    return changed


def with_layer(layer: Layer, *, of_optimizer: bool = True) -> Change:
    """Train one layer more; without `of_optimizer` no optimizer has it."""

    def changed(program: Program) -> Program:
        place = len(program.layers)
        first, *others = program.optimizers
        if of_optimizer:
            first = replace(first, layers=(*first.layers, place))
        return replace(program, layers=(*program.layers, layer), optimizers=(first, *others))

    return changed


def with_option(name: str, text: str) -> Change:
    """Ask each optimizer for an option; None where it has this option already."""

    def changed(program: Program) -> Program | None:
        if any(optimizer.option(name) for optimizer in program.optimizers):
            return None
        asked = [replace(each, options=(*each.options, (name, text))) for each in program.optimizers]
        return replace(program, optimizers=tuple(asked))

    return changed


def with_optimizer(name: str, **settings: object) -> Change:
    """Train by another optimizer, whose steps are not exact."""

    def changed(program: Program) -> Program | None:
        if any(each.name != "SGD" for each in program.optimizers):
            return None
        others = [replace(each, name=name, settings=tuple(settings.items())) for each in program.optimizers]
        return replace(program, optimizers=tuple(others), exact=False)

    return changed


def among_several(change: Change) -> Change:
    """Only where there is more than one rank."""
    return lambda program: change(program) if program.ranks > 1 else None


def of_dense(change: Change) -> Change:
    """Only where all gradients are dense: torch clips no others."""
    return lambda p: None if any("sparse" in layer.kind for layer in p.layers) else change(p)
