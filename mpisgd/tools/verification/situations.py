"""Situations: what can happen to a training, each as a change of a plain program.

    plain training            SITUATIONS["clipped"]              SITUATIONS["resumed"]
    ZeroGrad Backward Step    ZeroGrad Backward Clip Step        ZeroGrad Backward Step
    ZeroGrad Backward Step    ZeroGrad Backward Clip Step        Reload
    ...                       ...                                ZeroGrad Backward Step ...

A situation changes the program and not the method, so that several can be put on each other: `compose`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from mpisgd.tools.verification.program_changes import (
    Change,
    after_step,
    among_several,
    before_steps,
    change_backward,
    each_event,
    of_dense,
    with_layer,
    with_optimizer,
    with_option,
)
from mpisgd.tools.verification.programs.program import (
    AddGroup,
    Backward,
    Broadcast,
    Clip,
    Commit,
    Convert,
    EndJoin,
    Event,
    FailedBackward,
    Join,
    Layer,
    Lose,
    Optimizer,
    Program,
    Reload,
    RunOut,
    SetFrozen,
    SetGradient,
    SetRate,
    Step,
    Synchronize,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.serial_definition import has_codes

__all__ = ["SITUATIONS", "Situation", "compose", "plain_program"]

STEPS = 5
SHAPES = ((3,), (2, 5), (7,))
SPARSE = Optimizer(settings=(("lr", 0.25),))  # torch's momentum takes no sparse gradients


class Situation(NamedTuple):
    """One kind of thing that happens.

    Attributes:
        name: in tables.
        change: makes the program one in which it happens; None where that makes no sense.
        touches: what it acts on: "gradients", "window", "parameters", "state", "optimizers", "ranks".
            Two that touch the same are those that may disturb each other.
    """

    name: str
    change: Change
    touches: frozenset[str]


def plain_program(
    optimizer: Optimizer,
    ranks: int,
    ranks_per_host: int,
    *,
    exact: bool,
    seed: int = 0,
    dtype: str = "float64",
) -> Program:
    """Return a training of three parameters of a dtype in which nothing happens but steps."""
    layers = tuple(Layer(shape=shape, dtype=dtype) for shape in SHAPES)
    step: tuple[Event, ...] = (ZeroGrad(), Backward((1,)), Step())
    whole = replace(optimizer, layers=tuple(range(len(layers))))
    return Program(seed, ranks, ranks_per_host, exact, layers, (whole,), step * STEPS)


def compose(program: Program, situations: Iterable[Situation]) -> Program | None:
    """Return the program in which all of these happen, None where they make no sense together.

    They are put on it in the order of the table, whatever order they are given in.
    """
    wanted = {situation.name for situation in situations}
    changed: Program | None = program
    for name, situation in SITUATIONS.items():
        if changed is not None and name in wanted:
            changed = situation.change(changed)
    return None if changed is None else _numbered(changed)


def _numbered(program: Program) -> Program:
    """Return the program in which every pass has data of its own."""
    count, events = 0, list[Event]()
    for event in program.events:
        match event:
            case Backward() | FailedBackward():
                count += 1
                events.append(replace(event, data=(count,)))
            case Step(closure=data) if data:
                count += 1
                events.append(Step((count,)))
            case _:
                events.append(event)
    return replace(program, events=tuple(events))


# -- the changes that need more than one line ---------------------------------------------------------


def _two_halves(program: Program) -> Program:
    (first,) = program.optimizers
    return replace(
        program,
        optimizers=(replace(first, layers=first.layers[:1]), replace(first, layers=first.layers[1:])),
    )


def _same_twice(program: Program) -> Program | None:
    if len(program.optimizers) > 1:
        return None
    (first,) = program.optimizers
    # The parameters may differ by rank when the second one begins.
    second = replace(first, options=(*first.options, ("check_start", "False")))
    return replace(program, optimizers=(first, second))


def _started_differently(program: Program) -> Program:
    """Let ranks begin with different parameters, which become those of the first one, mostly early."""
    return replace(program, apart="after" if program.seed % 3 == 0 else "before")


def _sparse(program: Program) -> Program | None:
    if any(optimizer.name != "SGD" for optimizer in program.optimizers):
        return None
    plain = tuple(replace(each, settings=SPARSE.settings) for each in program.optimizers)
    whole = with_layer(Layer("sparse", (5, 2)))(replace(program, optimizers=plain))
    assert whole is not None
    return with_layer(Layer("partly sparse", (5, 2)))(whole)


def _windows(program: Program) -> Program | None:
    if any(optimizer.option("backward_passes_per_step") for optimizer in program.optimizers):
        return None
    doubled = each_event(program, Backward, lambda backward: (backward, backward))
    return with_option("backward_passes_per_step", "2")(doubled)


def _partial_window(program: Program) -> Program | None:
    if any(optimizer.passes < 2 for optimizer in program.optimizers):
        windows = _windows(program)
        return None if windows is None else _partial_window(windows)
    return change_backward(3, lambda backward, program: None)(program)


def _accumulated(program: Program) -> Program:
    def twice(event: Event) -> Sequence[Event]:
        assert isinstance(event, Backward)
        return replace(event, no_sync=True), event

    return each_event(program, Backward, twice)


def _closures(program: Program) -> Program:
    without = replace(program, events=tuple(e for e in program.events if not isinstance(e, Backward)))
    return each_event(without, Step, lambda step: (Step((1,)),))


def _synchronized(program: Program) -> Program:
    """Reduce gradients before a step; one takes them as they are, and the last one reduces them itself."""
    steps = itertools.count()

    def reduced(step: Event) -> Sequence[Event]:
        assert isinstance(step, Step)
        number = next(steps)
        skips = replace(step, as_they_are=number == 1 and not step.closure)
        return (step,) if number == STEPS - 1 else (Synchronize(), skips)

    changed = each_event(program, Step, reduced)
    last = max(
        (place for place, event in enumerate(changed.events) if isinstance(event, Backward)), default=-1
    )
    events = [
        replace(event, no_sync=True) if place == last and isinstance(event, Backward) else event
        for place, event in enumerate(changed.events)
    ]
    return replace(changed, events=tuple(events))


def _called_twice(program: Program) -> Program | None:
    """Train by an optimizer that takes the gradients of another place: only inexact losses depend on it."""
    if any(has_codes(optimizer.strategy) for optimizer in program.optimizers):
        return None  # those go with torch's own optimizers
    other = with_optimizer("Extragradient", lr=0.1)(program)
    elementwise = None if other is None else with_option("elementwise", "True")(other)
    return None if elementwise is None else _closures(elementwise)


def _in_one_order(program: Program) -> Program | None:
    """Add up all passes along one tree; methods that send something else refuse that, and are not asked."""
    others = any(
        optimizer.option("strategy") or optimizer.option("compression") for optimizer in program.optimizers
    )
    if others or program.ranks & (program.ranks - 1):
        return None
    windows = _windows(program)
    return None if windows is None else with_option("reproducible", "'ranks'")(windows)


def _clipped(program: Program) -> Program:
    norm = float("inf") if program.exact else 2.0  # that of the largest element is not rounded
    return each_event(program, Step, lambda step: (Clip(0.5, norm), step))


def _clipped_by_torch(program: Program) -> Program:
    norm = float("inf") if program.exact else 2.0
    return each_event(program, Step, lambda step: (Clip(0.5, norm, by_torch=True), step))


def _frozen_later(program: Program) -> Program:
    thawed = after_step(program, 2, SetFrozen(2, frozen=False))
    return after_step(thawed, 0, SetFrozen(2))


def _added_group(program: Program) -> Program:
    place = len(program.layers)
    longer = with_layer(Layer(shape=(4,)), of_optimizer=False)(program)
    assert longer is not None
    return after_step(longer, 1, AddGroup(place))


def _loses(waits: int) -> Change:
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


def _scaled(program: Program) -> Program | None:
    def overflows(backward: Backward, program: Program) -> Event:
        return replace(backward, overflow=(program.ranks - 1,))

    return change_backward(1, overflows)(replace(program, scaler=True))


def _converted(program: Program) -> Program:
    place = len(program.layers)
    longer = with_layer(Layer(shape=(2, 3, 2, 2)))(program)
    assert longer is not None
    return after_step(longer, 1, Convert(place, channels_last=True))


def _half(program: Program) -> Program | None:
    return with_layer(Layer(shape=(6,), dtype="bfloat16"))(program) if program.exact else None


def _two_rates(program: Program) -> Program:
    first, *others = program.layers
    return replace(program, layers=(first, *(replace(layer, scaled=True) for layer in others)))


def _skip_of_the_last(backward: Backward, program: Program) -> Event:
    return replace(backward, skipped=(program.ranks - 1,))


def _fewer(program: Program) -> Program:
    return after_step(program, 1, Reload(ranks=program.ranks - 1))


def _fewer_and_more(program: Program) -> Program:
    more = after_step(program, 2, Reload(ranks=program.ranks))
    return after_step(more, 0, Reload(ranks=program.ranks - 1))


def _uneven(program: Program) -> Program | None:
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


# -- the table ----------------------------------------------------------------------------------------


def _table() -> dict[str, Situation]:
    rows: tuple[tuple[str, str, Change], ...] = (
        # what the optimizers are
        ("two optimizers, a half each", "optimizers", _two_halves),
        ("two optimizers of the same", "optimizers state", _same_twice),
        ("Adam", "state", with_optimizer("Adam", lr=0.01, weight_decay=0.01)),
        ("fused AdamW", "state", with_optimizer("AdamW", lr=0.01, fused=True)),
        ("a closure that is called twice", "optimizers state window", _called_twice),
        ("Muon and AdamW", "state parameters", with_optimizer("MuonWithAdamW", lr=0.05)),
        ("other names", "parameters", lambda p: _renamed(p, "other")),
        ("no names", "parameters", lambda p: _renamed(p, "none")),
        ("two learning rates", "optimizers", _two_rates),
        ("others were deleted before", "optimizers gradients", lambda p: replace(p, forgotten=2)),
        ("started differently", "parameters", among_several(_started_differently)),
        # what they are asked for
        ("overlap", "gradients", with_option("overlap", "True")),
        ("no overlap", "gradients", with_option("overlap", "False")),
        ("small buckets", "gradients", with_option("bucket_cap_bytes", "1")),
        ("in one order", "gradients window", _in_one_order),
        ("sum", "gradients", with_option("op", "mpisgd.ReduceOp.SUM")),
        ("Adasum", "gradients", with_option("op", "mpisgd.Adasum")),
        ("predivided", "gradients", with_option("gradient_predivide_factor", "2.0")),
        ("error if not finite", "gradients", with_option("error_if_nonfinite", "True")),
        ("checked in sync", "parameters", with_option("check_in_sync_every", "2")),
        ("shared parameters", "parameters", with_option("share_parameters", "True")),
        ("a group of its own", "ranks", lambda p: replace(p, group="duplicate")),
        ("ranks reversed", "ranks", lambda p: replace(p, group="reversed")),
        # what the model is
        ("sparse", "gradients", _sparse),
        ("bfloat16 beside float64", "parameters gradients", _half),
        ("float32 beside float64", "parameters gradients", with_layer(Layer(dtype="float32"))),
        ("frozen from the start", "parameters", with_layer(Layer(frozen=True))),
        ("unused on all ranks", "gradients", with_layer(Layer(used_by="none"))),
        ("used by the first rank", "gradients", with_layer(Layer(used_by="first"))),
        ("used in turns", "gradients", with_layer(Layer(used_by="turns"))),
        ("used now and then", "gradients", with_layer(Layer(shape=(4,), used_by="odd"))),
        ("tied", "gradients", with_layer(Layer(shape=(4,), times=2))),
        ("transposed", "parameters", with_layer(Layer(shape=(3, 4), transposed=True))),
        ("recomputed", "gradients window", with_layer(Layer(shape=(4,), times=2, recomputed=True))),
        ("fewer elements than ranks", "parameters", with_layer(Layer(shape=()))),
        ("no elements", "parameters", with_layer(Layer(shape=(0,)))),
        ("long", "gradients", with_layer(Layer(shape=(70_000,)))),
        # what happens in each step
        ("closure", "window", _closures),
        ("two passes a step", "window", _windows),
        ("a partial window", "window", _partial_window),
        ("accumulated in no_sync", "window gradients", _accumulated),
        (
            "gradients kept as zeros",
            "gradients",
            lambda p: each_event(p, ZeroGrad, lambda z: (ZeroGrad(False),)),
        ),
        (
            "reset by the model",
            "gradients",
            lambda p: each_event(p, ZeroGrad, lambda z: (ZeroGrad(True, True),)),
        ),
        ("synchronized", "gradients window", _synchronized),
        ("set by the program", "gradients window", before_steps(SetGradient(1))),
        ("clipped", "gradients window", of_dense(_clipped)),
        ("clipped by torch", "gradients", of_dense(_clipped_by_torch)),
        ("clipped by value", "gradients", of_dense(before_steps(Clip(0.5, by_value=True)))),
        ("scaled, with an overflow", "gradients window", _scaled),
        (
            "a rank without a backward",
            "window gradients",
            among_several(change_backward(2, _skip_of_the_last)),
        ),
        # what happens once
        (
            "a backward that fails",
            "window gradients",
            lambda p: after_step(p, 1, ZeroGrad(), FailedBackward((1,))),
        ),
        ("frozen and thawed", "parameters", _frozen_later),
        ("a group is added", "parameters state", _added_group),
        ("another learning rate", "optimizers", lambda p: after_step(p, 1, SetRate(0.5))),
        ("broadcast", "parameters state", lambda p: after_step(p, 1, Broadcast(p.ranks - 1))),
        ("channels last after a step", "parameters", _converted),
        # twice: what was loaded is saved before a step has used it
        ("resumed", "state", lambda p: after_step(p, 1, Reload(), Reload())),
        ("resumed beside the former", "state", lambda p: after_step(p, 2, Reload(clears=False))),
        ("a rank fewer", "ranks state", among_several(_fewer)),
        ("a rank fewer, then as before", "ranks state", among_several(_fewer_and_more)),
        ("uneven data", "ranks gradients window", _uneven),
        ("a rank is lost", "ranks state window", among_several(_loses(0))),
        ("a rank is lost while it waits", "ranks state window", among_several(_loses(5))),
    )
    return {name: Situation(name, change, frozenset(touches.split())) for name, touches, change in rows}


def _renamed(program: Program, names: str) -> Program:
    return replace(program, optimizers=tuple(replace(each, names=names) for each in program.optimizers))


SITUATIONS = _table()
