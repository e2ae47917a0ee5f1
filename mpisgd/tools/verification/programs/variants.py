"""Other ways to say the same: what must not change the bits of a program, with or without a reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import mpisgd
from mpisgd.methods.catalogue import text_of
from mpisgd.tools.verification.programs.contract import sends_in_backward
from mpisgd.tools.verification.programs.events import (
    AddGroup,
    Backward,
    Clip,
    Convert,
    Event,
    FailedBackward,
    Reload,
    Step,
    Synchronize,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.program import Optimizer, Program
from mpisgd.tools.verification.programs.serial_definition import codes_between_hosts, rounds
from mpisgd.tools.verification.programs.training import SERIAL

__all__ = ["all_at_once", "ranks_agree", "same_bits", "variants"]

# Torch casts a float32 of their state to the parameter's dtype, when it is loaded: the next value differs.
# It does the same to all state of parameters that were converted before.
CAST_STATE = ("NAdam",)
# What they draw, whose chunk it is in, or how a product of gradients is rounded, depends on the order in
# which a backward has computed gradients, and that of a joint loss computes them in another one.
BY_PLACE = ("RandomK", "QSGD", "TernGrad", "Natural", "two_step", "BlockQuantized", "Adasum")
MEETS_RARELY = "ZeroOneAdam"
PATIENCE_S = 3600.0  # longer than any of these programs takes


def ranks_agree(program: Program) -> bool:
    """Return whether all ranks have the same parameters after every event."""
    if any(optimizer.name == MEETS_RARELY for optimizer in program.optimizers):
        return False
    return all(optimizer.strategy.goes_with.check_in_sync_every.goes for optimizer in program.optimizers)


def same_bits(program: Program) -> bool:
    """Return whether variants have the same bits, and not only the same values but for rounding.

    Where each rank has pieces of the gradients, their norm is the sum of those of the pieces. Optimizers that
    are made over the same parameters later, or with groups that were added, cut other pieces: the first ones
    have moved small parameters to lie side by side, and nobody moves them again. Dion goes on from the mean
    of the ranks' momenta where its state was asked for. A backward that is joined with that inside
    `no_sync()` may give a bucket another order, in which what a compressor rounds is added up. Learners are
    added up in the order of their ranks, and those in lock-step host by host.
    """
    is_saved = any(isinstance(event, Reload) for event in program.events)
    if is_saved and program.ranks > 1 and any(each.name == SERIAL for each in program.optimizers):
        return False
    if rounds(program) and _joined(program.events) != program.events:
        return False
    if 1 < program.ranks_per_host < program.ranks and any(map(_quorum, program.optimizers)):
        return False
    divides = any(
        "Sharded" in optimizer.option("strategy") or optimizer.option("share_parameters")
        for optimizer in program.optimizers
    )
    return program.exact or not divides or not any(isinstance(event, Clip) for event in program.events)


def variants(program: Program) -> Iterator[tuple[str, Program]]:
    """Yield programs that must end alike, each with a word for what was changed; see `same_bits`."""
    for name, change in _changes(program):
        yield name, change(program)


def all_at_once(program: Program) -> tuple[str, Program]:
    """Return the program with all changes together: one run shows what any of them would."""
    names, changed = list[str](), program
    for name, change in _changes(program):
        names.append(name)
        changed = change(changed)
    return ", ".join(names), changed


def _changes(program: Program) -> Iterator[tuple[str, Callable[[Program], Program]]]:
    reloads = [event for event in program.events if isinstance(event, Reload)]
    casts = any(isinstance(event, Convert) for event in program.events)
    casts |= any(optimizer.name in CAST_STATE for optimizer in program.optimizers)
    keeps = _keeps_what_failed(program) or _divides_otherwise(program)
    if not casts and any(not event.ranks for event in reloads) and not keeps:
        yield "not interrupted", lambda p: replace(p, events=tuple(_without_reloads(p)))
    if any(event.ranks and not event.forgets for event in reloads):
        yield "forgotten", lambda p: replace(p, events=tuple(_forgetting(p)))
    yield "renamed", _renamed
    if any(_quorum(optimizer) == "all" for optimizer in program.optimizers):
        yield "other learners are waited for otherwise", _waiting_otherwise
    by_place = any(
        name in o.option("compression") + o.option("op") for o in program.optimizers for name in BY_PLACE
    )
    if _joined(program.events) != program.events and program.exact and not by_place:
        yield "joined", lambda p: replace(p, events=_joined(p.events))


def _renamed(program: Program) -> Program:
    renamed = [replace(o, names="other" if o.names == "model" else "model") for o in program.optimizers]
    return replace(program, optimizers=tuple(renamed))


def _quorum(optimizer: Optimizer) -> object:
    return getattr(optimizer.strategy, "quorum", None)


def _waiting_otherwise(program: Program) -> Program:
    """Return the program in which learners of equal weights are in lock-step, or the quorum is one of them.

    That one waits for the others for as long as all of it takes. So do learners of several ranks.
    """
    return replace(program, optimizers=tuple(map(_waits_otherwise, program.optimizers)))


def _waits_otherwise(optimizer: Optimizer) -> Optimizer:
    if _quorum(optimizer) != "all":
        return optimizer
    strategy = cast(mpisgd.DiLoCo, optimizer.strategy)
    if optimizer.weighs_learners or strategy.learners != "rank":
        other = replace(strategy, quorum=1, grace_s=PATIENCE_S)
    else:
        other = replace(strategy, quorum=None, grace_s=None, weights=None)
    options = {**dict(optimizer.options), "strategy": text_of(other)}
    return replace(optimizer, options=tuple(options.items()))


def _keeps_what_failed(program: Program) -> bool:
    """Return whether a compressor may keep of a failed backward what it would not without the reloads.

    What was sent before a backward failed counts as sent, in residuals and in the number of reductions. New
    optimizers send nothing during a backward before they have reduced once, since they have no plan by then.
    """
    if not any("mpisgd.compress." in optimizer.option("compression") for optimizer in program.optimizers):
        return False
    is_new = False
    for event in program.events if sends_in_backward(program) else ():
        match event:
            case Reload():
                is_new = True
            case Step() | Synchronize() | Clip():
                is_new = False
            case FailedBackward() if is_new:
                return True
    return False


def _divides_otherwise(program: Program) -> bool:
    """Return whether something else is rounded after a reload.

    A group that is added has shares of its own until then.
    """
    adds = any(isinstance(event, AddGroup) for event in program.events)
    return codes_between_hosts(program) and adds


def _without_reloads(program: Program) -> Iterator[Event]:
    for event in program.events:
        yield ZeroGrad() if isinstance(event, Reload) and not event.ranks else event


def _forgetting(program: Program) -> Iterator[Event]:
    """Yield the events with what is each rank's own taken out, where their number changes: nobody gets it."""
    for event in program.events:
        yield replace(event, forgets=True) if isinstance(event, Reload) and event.ranks else event


def _joined(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """Return the events with each pass inside `no_sync()` joined with the pass that follows it."""
    done: list[Event] = []
    for event in events:
        before = done[-1] if done else None
        if (
            isinstance(event, Backward)
            and isinstance(before, Backward)
            and before.no_sync
            and before.skipped == event.skipped
        ):
            done[-1] = replace(event, data=(*before.data, *event.data))
        else:
            done.append(event)
    return tuple(done)
