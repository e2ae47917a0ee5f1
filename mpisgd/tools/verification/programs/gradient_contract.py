"""What a program must not do with gradients that it sets, empties, or has scaled."""

from __future__ import annotations

from mpisgd.tools.verification.programs.events import (
    Backward,
    Clip,
    Event,
    FailedBackward,
    Join,
    Reload,
    SetGradient,
    Step,
    Synchronize,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.program import ONE_BIT, Program
from mpisgd.tools.verification.programs.walk import Walk, anchors, trains_locally

__all__ = ["after_emptied", "after_scaled", "after_set"]


def after_set(walk: Walk, event: Event) -> str:
    """Note gradients that the program sets; return what is wrong with it."""
    match event:
        case SetGradient(layer=place):
            if place not in walk.layers or place not in anchors(walk.program, (place,)):
                return "no layer that trains and has a gradient"
            if walk.program.layers[place].kind != "dense" or walk.program.scaler:
                return "a gradient that may be sparse, or is scaled"
            if any(optimizer.name in ONE_BIT for optimizer in walk.program.optimizers):
                return "gradients are each rank's own"
            if walk.program.layers[place].transposed and _is_fused(walk.program):
                return "torch's fused optimizers walk a gradient in the order of memory, not of its parameter"
            if not walk.window.is_reduced and (walk.window.passes or walk.window.has_skips):
                return "gradients that are not reduced are set"
            if walk.program.exact and trains_locally(walk.program) and _is_rounded_once_set(walk.program):
                return "the mean of what it comes to on ranks that train by themselves is rounded"
            walk.is_set, walk.awaits_closure = True, not walk.window.is_reduced
        case ZeroGrad() | Reload() | FailedBackward():
            walk.is_set = walk.awaits_closure = False
        case Step(closure=data) if data:
            walk.is_set = walk.awaits_closure = False
        case Step() | Synchronize() | Clip() if walk.awaits_closure:
            return "a gradient of the program that is not reduced"
        case Clip(by_value=True) if walk.is_set:
            return "torch clips no values where there may be no gradient"
        case Backward() if walk.is_set:
            return "something is added to a gradient of the program"
    return ""


def after_emptied(walk: Walk, event: Event) -> str:
    """Note whether there is a gradient; return what is wrong with an event where there is none."""
    match event:
        case ZeroGrad(set_to_none=True) | Reload() | FailedBackward():
            walk.is_empty = True
        case Backward() | SetGradient():
            walk.is_empty = False
        case Step(closure=data) if data:
            walk.is_empty = False
        case Clip(by_value=True) if walk.is_empty:
            return "torch clips no values where there is no gradient"
        case Clip(by_value=True) if walk.window.has_skips and trains_locally(walk.program):
            return "torch clips no values on a rank that has no gradient"
    return ""


def _is_rounded_once_set(program: Program) -> bool:
    return any(isinstance(event, Clip | Join) for event in program.events)


def after_scaled(walk: Walk, event: Event) -> str:
    """Note what a scaler sees; return what is wrong with it."""
    if not walk.program.scaler:
        return "an infinite loss" if isinstance(event, Backward) and event.overflow else ""
    match event:
        case Backward():
            walk.has_gradients = True
            walk.overflows |= bool(event.overflow)
            if walk.is_unscaled:
                return "scaled gradients are added to others"
            if event.skipped and trains_locally(walk.program):
                return "a scaler of a rank without gradients"
        case Clip() | Step():
            if not walk.has_gradients and (
                isinstance(event, Clip) or walk.was_stepped or not walk.is_unscaled
            ):
                return "there is nothing to divide"
            if not walk.window.is_reduced:
                return "a scaler looks at gradients that are not reduced"
            # After a step they are still there, divided.
            walk.has_gradients, walk.is_unscaled = False, True
            walk.was_stepped = isinstance(event, Step)
        case ZeroGrad() | Reload() | FailedBackward():
            walk.has_gradients = walk.is_unscaled = walk.overflows = False
    return ""


def _is_fused(program: Program) -> bool:
    return any(dict(optimizer.settings).get("fused") for optimizer in program.optimizers)
