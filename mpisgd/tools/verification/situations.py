"""Situations: what can happen to a training, each as a change of a plain program.

    plain training            SITUATIONS["clipped"]              SITUATIONS["resumed"]
    ZeroGrad Backward Step    ZeroGrad Backward Clip Step        ZeroGrad Backward Step
    ZeroGrad Backward Step    ZeroGrad Backward Clip Step        Reload
    ...                       ...                                ZeroGrad Backward Step ...

A situation changes the program and not the method, so that several can be put on each other: `compose`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from mpisgd.tools.verification import situation_changes as changes
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
from mpisgd.tools.verification.programs.events import (
    Backward,
    Broadcast,
    Clip,
    Event,
    FailedBackward,
    Reload,
    SetGradient,
    SetRate,
    Step,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.program import Layer, Optimizer, Program

__all__ = ["SITUATIONS", "Situation", "compose", "plain_program"]

STEPS = 5
SHAPES = ((3,), (2, 5), (7,))


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


def _table() -> dict[str, Situation]:
    rows: tuple[tuple[str, str, Change], ...] = (
        # what the optimizers are
        ("two optimizers, a half each", "optimizers", changes.two_halves),
        ("two optimizers of the same", "optimizers state", changes.same_twice),
        ("Adam", "state", with_optimizer("Adam", lr=0.01, weight_decay=0.01)),
        ("fused AdamW", "state", with_optimizer("AdamW", lr=0.01, fused=True)),
        ("a closure that is called twice", "optimizers state window", changes.called_twice),
        ("Muon and AdamW", "state parameters", with_optimizer("MuonWithAdamW", lr=0.05)),
        ("other names", "parameters", lambda p: changes.renamed(p, "other")),
        ("no names", "parameters", lambda p: changes.renamed(p, "none")),
        ("two learning rates", "optimizers", changes.two_rates),
        ("others were deleted before", "optimizers gradients", lambda p: replace(p, forgotten=2)),
        ("started differently", "parameters", among_several(changes.started_differently)),
        # what they are asked for
        ("overlap", "gradients", with_option("overlap", "True")),
        ("no overlap", "gradients", with_option("overlap", "False")),
        ("small buckets", "gradients", with_option("bucket_cap_bytes", "1")),
        ("in one order", "gradients window", changes.in_one_order),
        ("sum", "gradients", with_option("op", "mpisgd.ReduceOp.SUM")),
        ("Adasum", "gradients", with_option("op", "mpisgd.Adasum")),
        ("predivided", "gradients", with_option("gradient_predivide_factor", "2.0")),
        ("error if not finite", "gradients", with_option("error_if_nonfinite", "True")),
        ("checked in sync", "parameters", with_option("check_in_sync_every", "2")),
        ("shared parameters", "parameters", with_option("share_parameters", "True")),
        ("a group of its own", "ranks", lambda p: replace(p, group="duplicate")),
        ("ranks reversed", "ranks", lambda p: replace(p, group="reversed")),
        # what the model is
        ("sparse", "gradients", changes.sparse),
        ("bfloat16 beside float64", "parameters gradients", changes.half),
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
        ("closure", "window", changes.closures),
        ("two passes a step", "window", changes.windows),
        ("a partial window", "window", changes.partial_window),
        ("accumulated in no_sync", "window gradients", changes.accumulated),
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
        ("synchronized", "gradients window", changes.synchronized),
        ("set by the program", "gradients window", before_steps(SetGradient(1))),
        ("clipped", "gradients window", of_dense(changes.clipped)),
        ("clipped by torch", "gradients", of_dense(changes.clipped_by_torch)),
        ("clipped by value", "gradients", of_dense(before_steps(Clip(0.5, by_value=True)))),
        ("scaled, with an overflow", "gradients window", changes.scaled),
        (
            "a rank without a backward",
            "window gradients",
            among_several(change_backward(2, changes.skip_of_the_last)),
        ),
        # what happens once
        (
            "a backward that fails",
            "window gradients",
            lambda p: after_step(p, 1, ZeroGrad(), FailedBackward((1,))),
        ),
        ("frozen and thawed", "parameters", changes.frozen_later),
        ("a group is added", "parameters state", changes.added_group),
        ("another learning rate", "optimizers", lambda p: after_step(p, 1, SetRate(0.5))),
        ("broadcast", "parameters state", lambda p: after_step(p, 1, Broadcast(p.ranks - 1))),
        ("channels last after a step", "parameters", changes.converted),
        # twice: what was loaded is saved before a step has used it
        ("resumed", "state", lambda p: after_step(p, 1, Reload(), Reload())),
        ("resumed beside the former", "state", lambda p: after_step(p, 2, Reload(clears=False))),
        ("a rank fewer", "ranks state", among_several(changes.fewer)),
        ("a rank fewer, then as before", "ranks state", among_several(changes.fewer_and_more)),
        ("uneven data", "ranks gradients window", changes.uneven),
        ("a rank is lost", "ranks state window", among_several(changes.lose_last(0))),
        ("a rank is lost while it waits", "ranks state window", among_several(changes.lose_last(5))),
    )
    return {name: Situation(name, change, frozenset(touches.split())) for name, touches, change in rows}


SITUATIONS = _table()
