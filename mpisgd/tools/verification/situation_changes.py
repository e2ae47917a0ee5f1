"""Changes of a program that need more than one line: each makes one situation happen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from mpisgd.tools.verification.program_changes import (
    Change,
    after_step,
    change_backward,
    each_event,
    with_layer,
    with_optimizer,
    with_option,
)
from mpisgd.tools.verification.programs.events import (
    AddGroup,
    Backward,
    Broadcast,
    Clip,
    Commit,
    Convert,
    EndJoin,
    Event,
    Join,
    Lose,
    Reload,
    RunOut,
    SetFrozen,
    Step,
    Synchronize,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.program import Layer, Optimizer, Program
from mpisgd.tools.verification.programs.serial_definition import has_codes

__all__ = [
    "accumulated",
    "added_group",
    "called_twice",
    "clipped",
    "clipped_by_torch",
    "closures",
    "converted",
    "fewer",
    "fewer_and_more",
    "frozen_later",
    "half",
    "in_one_order",
    "lose_last",
    "partial_window",
    "renamed",
    "same_twice",
    "scaled",
    "skip_of_the_last",
    "sparse",
    "started_differently",
    "synchronized",
    "two_halves",
    "two_rates",
    "uneven",
    "windows",
]

SPARSE = Optimizer(settings=(("lr", 0.25),))  # torch's momentum takes no sparse gradients


def two_halves(program: Program) -> Program:
    """Give the first layer to one optimizer and all others to a second one."""
    (first,) = program.optimizers
    return replace(
        program,
        optimizers=(replace(first, layers=first.layers[:1]), replace(first, layers=first.layers[1:])),
    )


def same_twice(program: Program) -> Program | None:
    """Train all parameters by two optimizers of one kind; None where there are two already."""
    if len(program.optimizers) > 1:
        return None
    (first,) = program.optimizers
    # The parameters may differ by rank when the second one begins.
    second = replace(first, options=(*first.options, ("check_start", "False")))
    return replace(program, optimizers=(first, second))


def started_differently(program: Program) -> Program:
    """Let ranks begin with different parameters, which become those of the first one, mostly early."""
    return replace(program, apart="after" if program.seed % 3 == 0 else "before")


def sparse(program: Program) -> Program | None:
    """Add a layer with sparse gradients, and one that has them in every second backward only."""
    if any(optimizer.name != "SGD" for optimizer in program.optimizers):
        return None
    plain = tuple(replace(each, settings=SPARSE.settings) for each in program.optimizers)
    whole = with_layer(Layer("sparse", (5, 2)))(replace(program, optimizers=plain))
    assert whole is not None
    return with_layer(Layer("partly sparse", (5, 2)))(whole)


def windows(program: Program) -> Program | None:
    """Have two backward passes fill a window; None where the number of passes is set already."""
    if any(optimizer.option("backward_passes_per_step") for optimizer in program.optimizers):
        return None
    doubled = each_event(program, Backward, lambda backward: (backward, backward))
    return with_option("backward_passes_per_step", "2")(doubled)


def partial_window(program: Program) -> Program | None:
    """Take a backward pass away, so that a step comes in the middle of a window."""
    if any(optimizer.passes < 2 for optimizer in program.optimizers):
        doubled = windows(program)
        return None if doubled is None else partial_window(doubled)
    return change_backward(3, lambda backward, program: None)(program)


def accumulated(program: Program) -> Program:
    """Precede each backward pass by one inside `no_sync()`."""

    def twice(event: Event) -> Sequence[Event]:
        assert isinstance(event, Backward)
        return replace(event, no_sync=True), event

    return each_event(program, Backward, twice)


def closures(program: Program) -> Program:
    """Compute the gradients of each step in a closure."""
    without = replace(program, events=tuple(e for e in program.events if not isinstance(e, Backward)))
    return each_event(without, Step, lambda step: (Step((1,)),))


def synchronized(program: Program) -> Program:
    """Reduce gradients before a step; one takes them as they are, and the last one reduces them itself."""
    steps = itertools.count()
    last_step = sum(isinstance(event, Step) for event in program.events) - 1

    def reduced(step: Event) -> Sequence[Event]:
        assert isinstance(step, Step)
        number = next(steps)
        skips = replace(step, as_they_are=number == 1 and not step.closure)
        return (step,) if number == last_step else (Synchronize(), skips)

    changed = each_event(program, Step, reduced)
    last = max(
        (place for place, event in enumerate(changed.events) if isinstance(event, Backward)), default=-1
    )
    events = [
        replace(event, no_sync=True) if place == last and isinstance(event, Backward) else event
        for place, event in enumerate(changed.events)
    ]
    return replace(changed, events=tuple(events))


def called_twice(program: Program) -> Program | None:
    """Train by an optimizer that takes the gradients of another place: only inexact losses depend on it."""
    if any(has_codes(optimizer.strategy) for optimizer in program.optimizers):
        return None  # those go with torch's own optimizers
    other = with_optimizer("Extragradient", lr=0.1)(program)
    elementwise = None if other is None else with_option("elementwise", "True")(other)
    return None if elementwise is None else closures(elementwise)


def in_one_order(program: Program) -> Program | None:
    """Add up all passes along one tree; methods that send something else refuse that, and are not asked."""
    others = any(
        optimizer.option("strategy") or optimizer.option("compression") for optimizer in program.optimizers
    )
    if others or program.ranks & (program.ranks - 1):
        return None
    doubled = windows(program)
    return None if doubled is None else with_option("reproducible", "'ranks'")(doubled)


def clipped(program: Program) -> Program:
    """Clip by `optimizer.clip_grad_norm_` before each step."""
    norm = float("inf") if program.exact else 2.0  # that of the largest element is not rounded
    return each_event(program, Step, lambda step: (Clip(0.5, norm), step))


def clipped_by_torch(program: Program) -> Program:
    """Clip by torch's own function before each step."""
    norm = float("inf") if program.exact else 2.0
    return each_event(program, Step, lambda step: (Clip(0.5, norm, by_torch=True), step))


def frozen_later(program: Program) -> Program:
    """Freeze a layer after the first step, and thaw it after the third."""
    thawed = after_step(program, 2, SetFrozen(2, frozen=False))
    return after_step(thawed, 0, SetFrozen(2))


def added_group(program: Program) -> Program:
    """Add a parameter group after the second step."""
    place = len(program.layers)
    longer = with_layer(Layer(shape=(4,)), of_optimizer=False)(program)
    assert longer is not None
    return after_step(longer, 1, AddGroup(place))


def lose_last(waits: int) -> Change:
    """Lose the last rank after the second step before the end, and train two steps without it.

    The others go back to a commit. Where the rank is lost while it waits, they may be anywhere.
    """

    def changed(program: Program) -> Program | None:
        if program.is_resized or program.loses or any(isinstance(e, Broadcast) for e in program.events):
            return None
        last = [i for i, event in enumerate(program.events) if isinstance(event, Step)][-2] + 1
        step = program.events[last:]
        lost = (Commit(), Commit(), *step[:1], Lose((program.ranks - 1,), waits), *step[1:])
        return replace(program, events=(*program.events[:last], *lost, *step, *step))

    return changed


def scaled(program: Program) -> Program | None:
    """Train with a GradScaler; in the second backward pass the loss of the last rank is infinite."""

    def overflows(backward: Backward, program: Program) -> Event:
        return replace(backward, overflow=(program.ranks - 1,))

    return change_backward(1, overflows)(replace(program, scaler=True))


def converted(program: Program) -> Program:
    """Give a layer of four dimensions the memory format channels last after the second step."""
    place = len(program.layers)
    longer = with_layer(Layer(shape=(2, 3, 2, 2)))(program)
    assert longer is not None
    return after_step(longer, 1, Convert(place, channels_last=True))


def half(program: Program) -> Program | None:
    """Add a layer of bfloat16; None where the program's numbers are rounded."""
    return with_layer(Layer(shape=(6,), dtype="bfloat16"))(program) if program.exact else None


def two_rates(program: Program) -> Program:
    """Halve the learning rate of all layers but the first."""
    first, *others = program.layers
    return replace(program, layers=(first, *(replace(layer, scaled=True) for layer in others)))


def skip_of_the_last(backward: Backward, program: Program) -> Event:
    """Leave the backward pass out on the last rank."""
    return replace(backward, skipped=(program.ranks - 1,))


def fewer(program: Program) -> Program:
    """Resume on a rank fewer after the second step."""
    return after_step(program, 1, Reload(ranks=program.ranks - 1))


def fewer_and_more(program: Program) -> Program:
    """Resume on a rank fewer after the first step, and on as many as before after the third."""
    more = after_step(program, 2, Reload(ranks=program.ranks))
    return after_step(more, 0, Reload(ranks=program.ranks - 1))


def uneven(program: Program) -> Program | None:
    """Let a rank have no data in the last two steps, and another one none in the last, inside `join()`."""
    if program.loses or program.ranks < 2:
        return None
    steps = [place for place, event in enumerate(program.events) if isinstance(event, Step)]
    begin, middle = steps[-3] + 1, steps[-2] + 1
    ordinary = (ZeroGrad, Backward, Step, Clip, Synchronize)
    while begin < middle and not isinstance(program.events[begin], ordinary):
        begin += 1  # what happens between two steps
    last = 0 if program.is_resized else program.ranks - 1
    early = (RunOut((1,)),) if program.ranks > 2 and not program.is_resized else ()
    before, block, rest = program.events[:begin], program.events[begin:middle], program.events[middle:]
    return replace(program, events=(*before, Join(), *early, *block, RunOut((last,)), *rest, EndJoin()))


def renamed(program: Program, names: str) -> Program:
    """Give the parameters other names, or none."""
    return replace(program, optimizers=tuple(replace(each, names=names) for each in program.optimizers))
