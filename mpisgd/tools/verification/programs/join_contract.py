"""What a program must not do inside `join()`, and which methods have none."""

from __future__ import annotations

import mpisgd
from mpisgd.gradients.weight import why_not_weighted
from mpisgd.tools.verification.programs.events import (
    Backward,
    Clip,
    EndJoin,
    Event,
    Join,
    Reload,
    RunOut,
    SetGradient,
    SetRate,
    Step,
    Synchronize,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.option_text import evaluated
from mpisgd.tools.verification.programs.program import ONE_BIT, Program
from mpisgd.tools.verification.programs.walk import Walk, trains_locally

__all__ = ["has_no_join", "inside_join"]

INSIDE_JOIN = (Backward, Step, ZeroGrad, Clip, SetGradient, Synchronize, SetRate, RunOut, EndJoin)
DECIDES_JOIN = ("strategy", "compression")


def inside_join(walk: Walk, event: Event) -> str:
    """Note who has data; return what is wrong with an event inside `join()`."""
    window = walk.window
    match event:
        case Join():
            if walk.with_data or window.passes or window.has_skips:
                return "a join() inside another one, or within a window"
            walk.with_data, walk.ran_out, walk.is_rate_new = {*range(walk.num_ranks)}, False, False
            return ""
        case RunOut() | EndJoin() if not walk.with_data:
            return "it is not inside join()"
        case RunOut(ranks=ranks):
            walk.with_data -= {*ranks}
            walk.ran_out = True
            if not walk.with_data or window.passes:
                return "nobody has data, or a rank runs out of it within a window"
        case EndJoin():
            walk.with_data = set()
            walk.is_stale = walk.ran_out and trains_locally(walk.program)
            if walk.ran_out and walk.is_rate_new:
                return "ranks without data are told of settings in a step"
        case Step() if walk.with_data:
            walk.is_rate_new = False
        case SetRate() if walk.with_data:
            walk.is_rate_new = True
        case _ if walk.with_data and not isinstance(event, INSIDE_JOIN):
            return "ranks without data do not come to it"
        case Backward(skipped=skipped) if walk.with_data and skipped:
            return "ranks without data have no backward anyway"
        case ZeroGrad() | Reload():
            walk.is_stale = False
        case Backward() | Step() | Synchronize() | Clip() if walk.is_stale:
            return "ranks that ran out of data have gradients of batches that they have stepped with"
    return ""


def has_no_join(program: Program) -> bool:
    """Return whether mpisgd refuses `join()` for a method: it says why at its beginning."""
    if any(optimizer.name in ONE_BIT for optimizer in program.optimizers):
        return True
    layers = [layer for optimizer in program.optimizers for layer in optimizer.layers]
    if len({*layers}) < len(layers):
        return True
    for optimizer in program.optimizers:
        options = {name: evaluated(text) for name, text in optimizer.options if name in DECIDES_JOIN}
        strategy = options.get("strategy", mpisgd.Synchronous())
        compression = options.get("compression", mpisgd.Compression.none)
        if not strategy.goes_with.uneven_data.goes or optimizer.option("op") == "mpisgd.Adasum":
            return True
        if not isinstance(compression, mpisgd.Compressor) or why_not_weighted(compression):
            return True
    return False
