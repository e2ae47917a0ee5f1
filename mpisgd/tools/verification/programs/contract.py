"""What a program must not do, by the documentation of mpisgd or of torch: `violation` names it.

A program that mpisgd refuses with an error on all ranks is no violation, but a refusal. These are the
rules that nobody checks, or that only some ranks would notice. Those who draw and shrink programs keep to
them.
"""

from __future__ import annotations

from mpisgd.tools.verification.programs.events import (
    AddGroup,
    Backward,
    Broadcast,
    Clip,
    Convert,
    Event,
    FailedBackward,
    Join,
    Reload,
    SetFrozen,
    Step,
    Synchronize,
    ZeroGrad,
)
from mpisgd.tools.verification.programs.gradient_contract import after_emptied, after_scaled, after_set
from mpisgd.tools.verification.programs.join_contract import has_no_join, inside_join
from mpisgd.tools.verification.programs.lost_ranks import resumed_at, violation_of_losses
from mpisgd.tools.verification.programs.program import CLOSED, ONE_BIT, Optimizer, Program
from mpisgd.tools.verification.programs.training import SERIAL
from mpisgd.tools.verification.programs.walk import Walk, Window, anchors, begin

__all__ = ["may_be_refused", "sends_in_backward", "violation"]


def violation(program: Program) -> str:
    """Return which rule a program breaks, "" if none."""
    if program.loses:
        return violation_of_losses(program) or next(filter(None, map(violation, resumed_at(program))), "")
    for place, optimizer in enumerate(program.optimizers):
        if not optimizer.layers:
            return f"optimizer {place} has no layers"
        if not anchors(program, optimizer.layers):
            return f"every layer of optimizer {place} may be without a gradient"
        if any(layer >= len(program.layers) for layer in optimizer.layers):
            return "no such layer"
        later = {layer for other in program.optimizers[place + 1 :] for layer in other.layers}
        own = tuple(
            layer for layer in optimizer.layers if layer not in later
        )  # the last one reduces the others
        if optimizer.passes > 1 and own and not anchors(program, own):
            return (
                f"a backward may be no pass of optimizer {place}, which has gradients of other layers alone"
            )
    if broken := _impossible(program):
        return broken
    walk = begin(program)
    for event in program.events:
        if (
            broken := inside_join(walk, event)
            or _in_one_order(walk, event)
            or _after_other(walk, event)
            or after_scaled(walk, event)
            or after_set(walk, event)
            or after_emptied(walk, event)
            or _after(walk, event)
        ):
            return f"{event}: {broken}"
    if walk.with_data:
        return "join() without an end"
    if walk.window.has_skips and not walk.window.is_settled:
        return "it ends before a rank without a backward takes part in the reduction"
    if program.is_resized and any(map(_has_learners, program.optimizers)):
        return "learners go on with as many ranks, and some ranks would not see that it is refused"
    refuses_join = program.is_uneven and has_no_join(program)
    if program.is_resized and (refuses_join or (walk.adds and _reduce_once(program))):
        return "some ranks would not see that it is refused"
    return ""


def _impossible(program: Program) -> str:
    """Return the reasons why a program is refused, whatever happens."""
    names = {optimizer.name for optimizer in program.optimizers}
    if names & {*ONE_BIT, *CLOSED} and (len(program.optimizers) > 1 or program.scaler):
        return "an optimizer that is alone, and without a scaler"
    if program.scaler and (len(program.optimizers) > 1 or _raises_if_nonfinite(program)):
        return "a scaler of several optimizers, or of gradients that must be finite"
    if program.scaler and any(layer.dtype == "float16" for layer in program.layers):
        return "torch scales no gradients of float16"
    if names & {"LBFGS"} and any(program.layers[i].scaled for i in program.optimizers[0].layers):
        return "LBFGS has one parameter group"
    if "LBFGS" in names and any(layer.transposed for layer in program.layers):
        return "LBFGS views gradients as flat"
    if "LBFGS" in names and program.is_resized and all(0 in layer.shape for layer in program.layers):
        return "torch raises where the largest of no gradients is asked for, which some ranks would not see"
    layers = [layer for optimizer in program.optimizers for layer in optimizer.layers]
    strategy = program.optimizers[0].option("strategy")
    if len({*layers}) < len(layers) and any(mode in strategy for mode in ("async", "ssp")):
        return "parameters of servers at which nobody waits have one optimizer"
    is_sparse = any("sparse" in layer.kind for layer in program.layers)
    if (len({*layers}) < len(layers) or is_sparse) and any(
        o.option("reproducible") for o in program.optimizers
    ):
        return "one order of sums is that of dense gradients, each of one optimizer"
    if names & {*ONE_BIT} and program.optimizers[0].options:
        return "1-bit optimizers are not wrapped"
    freezes = names & {*ONE_BIT} and 100 not in dict(program.optimizers[0].settings).values()
    if freezes and SERIAL not in names and program.is_resized:
        return "some ranks would not see that the first gradient of a parameter comes late"
    return ""


def _raises_if_nonfinite(program: Program) -> bool:
    return any(optimizer.option("error_if_nonfinite") for optimizer in program.optimizers)


def may_be_refused(program: Program) -> bool:
    """Return whether mpisgd says that this program must not do what it does, in the middle of it.

    Reduced gradients must not be added to where they are divided or sums, and then they can be reset by the
    optimizer only, or to None. Nobody else may read gradients that are divided. Parameters whose first
    gradient comes late are refused by 1-bit optimizers, sparse gradients by Adasum, `join()` by methods that
    do not go with it, and 16-bit parameters that are added where gradients travel as codes. Learners at their
    own pace take no other parameters, and no state of another rank.
    """
    walk = begin(program)
    for event in program.events:
        _after(walk, event)
    if (program.is_uneven and has_no_join(program)) or _sums_sparse_otherwise(program):
        return True
    if _adds_what_has_no_code(program) or _divides_within_a_step(program) or _changes_learners(program):
        return True
    is_one_bit = any(optimizer.name in ONE_BIT for optimizer in program.optimizers)
    return is_one_bit or _reads_divided(program) or (walk.adds and _reduce_once(program))


def _sums_sparse_otherwise(program: Program) -> bool:
    """Return whether gradients are sparse that are combined by something else than a sum."""
    if not any("sparse" in layer.kind for layer in program.layers):
        return False
    return any(optimizer.option("op") == "mpisgd.Adasum" for optimizer in program.optimizers)


def _divides_within_a_step(program: Program) -> bool:
    """Return whether parameters are divided anew, for sparse gradients, between two calls of a closure."""
    divides = any(
        "Sharded" in o.option("strategy") or o.option("share_parameters") for o in program.optimizers
    )
    closed = any(optimizer.name in CLOSED for optimizer in program.optimizers)
    return divides and closed and any("sparse" in layer.kind for layer in program.layers)


def _adds_what_has_no_code(program: Program) -> bool:
    """Return whether parameters are added whose sums of gradients cannot travel as codes."""
    added = [program.layers[event.layer] for event in program.events if isinstance(event, AddGroup)]
    codes = any("BlockQuantized" in optimizer.option("strategy") for optimizer in program.optimizers)
    return codes and any(layer.dtype in ("bfloat16", "float16") for layer in added)


def _changes_learners(program: Program) -> bool:
    """Return whether learners get other parameters than they began with, or the state of another one."""
    changes = any(isinstance(event, AddGroup | Broadcast) for event in program.events)
    return changes and any(map(_has_learners, program.optimizers))


def _has_learners(optimizer: Optimizer) -> bool:
    """Return whether each rank is a learner that meets the others at the first one."""
    return "quorum" in optimizer.option("strategy")


def _reads_divided(program: Program) -> bool:
    """Return whether torch, or a second optimizer, reads gradients that are divided among ranks."""
    divides = ("Sharded", "ParameterServer")
    if not any(
        o.option("share_parameters") or any(name in o.option("strategy") for name in divides)
        for o in program.optimizers
    ):
        return False
    layers = [layer for optimizer in program.optimizers for layer in optimizer.layers]
    by_others = any(
        isinstance(event, Clip) and (event.by_torch or event.by_value) for event in program.events
    )
    return by_others or len({*layers}) < len(layers)


def _in_one_order(walk: Walk, event: Event) -> str:
    """Return why an event may not be in a program that adds up all passes along one tree; "" if it may."""
    if not any(optimizer.option("reproducible") for optimizer in walk.program.optimizers):
        return ""
    passes, window = min(optimizer.passes for optimizer in walk.program.optimizers), walk.window
    match event:
        case Backward() if event.no_sync or event.skipped or window.passes >= passes:
            return "a pass that is none of the tree"
        case Step(closure=data) if data:
            return "the loss of a closure is added up in another order"
        case Step() | Synchronize() | Clip() if window.passes % passes:
            return "some passes are missing"
        case Join() | Reload(ranks=1 | 2 | 3 | 4):
            return "other ranks"
    return ""


def _after_other(walk: Walk, event: Event) -> str:
    """Note what changes ranks, or parameters; return what is wrong with it."""
    window, program = walk.window, walk.program
    names = {optimizer.name for optimizer in program.optimizers}
    match event:
        case Backward() | FailedBackward():
            walk.has_begun = True
            if isinstance(event, Backward) and {*range(walk.num_ranks)} <= {*event.skipped}:
                return "a backward of nobody"
            if isinstance(event, Backward) and event.no_sync and names & {*ONE_BIT}:
                return "1-bit optimizers have no no_sync()"
        case Step(closure=data) if data:
            walk.has_begun = True
            if window.passes or window.has_skips or len(program.optimizers) > 1 or program.scaler:
                return "a closure that is not all there is"
            if names & {*ONE_BIT}:
                return "1-bit optimizers call a closure once, and average what it has left"
        case Step():
            if names & {*CLOSED}:
                return "an optimizer that needs a closure"
        case Synchronize() | Clip():
            if names & {*ONE_BIT}:
                return "gradients are each rank's own"
        case AddGroup():
            if "LBFGS" in names:
                return "LBFGS has one parameter group"
        case Reload(ranks=ranks) if ranks:
            if ranks > program.ranks or ranks == walk.num_ranks or program.group != "world":
                return "no other ranks"
            walk.num_ranks = ranks
        case Broadcast():
            if event.src >= walk.num_ranks or window.passes or window.has_skips:
                return "a broadcast within a window, or of a rank that does not train"
        case Convert():
            if event.layer >= len(program.layers):
                return "no such layer"
            if window.passes or window.has_skips or _may_not_move(program):
                return "parameters that must stay where they are"
            if walk.has_begun and any(dict(o.settings).get("fused") for o in program.optimizers):
                return "torch's fused optimizers have their state as parameters were when it was made"
            if event.channels_last and "LBFGS" in names:
                return "LBFGS views gradients as flat"
            if event.channels_last and len(program.layers[event.layer].shape) != 4:
                return "channels last of something else than images"
    return ""


def _may_not_move(program: Program) -> bool:
    options = [dict(optimizer.options) for optimizer in program.optimizers]
    one_bit = any(optimizer.name in ONE_BIT for optimizer in program.optimizers)
    return one_bit or any({"share_parameters", "strategy"} & each.keys() for each in options)


def _after(walk: Walk, event: Event) -> str:
    """Note an event; return what is wrong with it."""
    window, program = walk.window, walk.program
    _note_reductions(walk, event)
    passes = min(optimizer.passes for optimizer in program.optimizers)
    match event:
        case Backward():
            if any(rank >= program.ranks for rank in event.skipped):
                return "no such rank"
            window.passes += not event.no_sync
            window.has_skips |= bool(event.skipped)
            if window.has_skips and window.has_ended:
                return "gradients that were reduced on some ranks only are added to"
            ends_window = not event.no_sync and window.passes % passes == 0
            window.has_ended |= ends_window
            window.is_reduced = ends_window and not window.has_skips and _passes_are_alike(program)
            if window.has_skips and (window.passes > passes or window.is_settled):
                return "a rank without this backward is not told of the reduction"
            if program.exact and walk.is_clipped:
                return "the mean of clipped gradients is rounded"
        case FailedBackward():
            if window.has_skips:
                return "a rank without a backward before one that fails"
            if sends_in_backward(program) and not _all_notice_a_failure(program):
                return "some ranks have sent gradients before it fails, and others have had none"
            walk.window, walk.is_clipped, walk.is_stepped = Window(), False, False
        case ZeroGrad(by_model=False) | Reload():
            if window.has_skips and not window.is_settled:
                return "a rank without a backward does not take part in the reduction"
            walk.window, walk.is_clipped, walk.is_stepped = Window(), False, False
        case ZeroGrad():
            if window.has_skips:
                return "a reset by the model while a rank is without a backward"
            walk.is_clipped = walk.is_stepped = False
            window.is_settled &= not event.set_to_none  # that it is None now tells the optimizer
        case Step():
            if program.exact and walk.is_stepped:
                return "the mean of clipped gradients is rounded"
            if event.as_they_are and not (window.is_reduced and window.is_settled):
                return "gradients that are not reduced are taken as they are"
            walk.window, walk.is_stepped = Window(is_settled=walk.overflows), walk.is_clipped
        case Synchronize():
            window.is_settled = window.is_reduced = True
        case Clip():
            if (event.by_torch or event.by_value) and not window.is_reduced:
                return "gradients that are not reduced are clipped"
            window.is_settled = window.is_reduced = walk.is_clipped = True
            if program.exact and not event.by_value and event.norm_type != float("inf"):
                return "a norm that is rounded"
            if program.exact and (
                any(layer.dtype != "float64" for layer in program.layers)
                or any(isinstance(each, Convert) for each in program.events)
            ):
                return "a factor that is rounded to the gradients' precision, or is not"
        case AddGroup():
            if event.layer in walk.layers or event.layer >= len(program.layers):
                return "an optimizer has this layer"
            if window.has_skips and not window.is_settled:
                return "a group is added while a rank is without a backward"
            walk.layers.add(event.layer)
        case SetFrozen():
            if event.layer >= len(program.layers):
                return "no such layer"
            if window.passes or window.has_skips:
                return "frozen within a window"
    return ""


def _note_reductions(walk: Walk, event: Event) -> None:
    """Note whether there are reduced gradients, and whether something is added to them."""
    passes = min(optimizer.passes for optimizer in walk.program.optimizers)
    match event:
        case Backward():
            walk.adds |= walk.is_reduced
            walk.is_reduced |= not event.no_sync and (walk.window.passes + 1) % passes == 0
        case FailedBackward():
            walk.adds |= walk.is_reduced
            walk.is_reduced = False
        case Step() | Synchronize() | Clip():
            walk.is_reduced = True
        case ZeroGrad(by_model=True, set_to_none=False):
            walk.adds |= walk.is_reduced
        case ZeroGrad() | Reload():
            walk.is_reduced = False


def _passes_are_alike(program: Program) -> bool:
    return len({optimizer.passes for optimizer in program.optimizers}) == 1


def sends_in_backward(program: Program) -> bool:
    """Return whether gradients may be sent before a backward is over."""
    options = [dict(optimizer.options) for optimizer in program.optimizers]
    divides = any("stage=2" in each.get("strategy", "") for each in options)
    return bool(program.ranks_per_host) or divides or any(each.get("overlap") == "True" for each in options)


def _all_notice_a_failure(program: Program) -> bool:
    """Return whether a backward that fails has a gradient on all ranks before, or on none has sent more."""
    if all(layer.used_by in ("all", "none", "odd") for layer in program.layers):
        return True
    return all(len(anchors(program, optimizer.layers)) > 1 for optimizer in program.optimizers)


def _reduce_once(program: Program) -> bool:
    """Return whether gradients may not be added to after they were reduced."""
    return any(
        optimizer.sums
        or {"share_parameters", "strategy", "compression", "op"} & dict(optimizer.options).keys()
        for optimizer in program.optimizers
    )
