"""Which programs have a definition in one process beside joined losses: the paper of their method."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mpisgd
from mpisgd.compress.compressor import Casting
from mpisgd.methods.paper_kit import Paper
from mpisgd.methods.power_sgd.paper import PowerSGD
from mpisgd.methods.synchronous.paper import Synchronous
from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.by_paper import ByPaper, arguments_of, averages_gradients, paper_among
from mpisgd.tools.verification.programs.one_bit_papers import why_no_paper
from mpisgd.tools.verification.programs.program import CLOSED, ONE_BIT, Program

__all__ = ["codes_between_hosts", "definition_of", "has_codes", "rounds", "why_undefined"]

CHANGE_BUCKETS = (events.SetFrozen, events.AddGroup)  # of gradients


def definition_of(program: Program) -> type[ByPaper] | None:
    """Return a function that makes the definition of a program's method; None: it has none here."""
    return None if why_undefined(program) else ByPaper


@lru_cache(maxsize=64)  # asked for several times of each program
def why_undefined(program: Program) -> str:
    """Return why a program has no definition by a paper, "" if it has one."""
    if program.optimizers[0].name in ONE_BIT:
        return why_no_paper(program)
    layers = [layer for optimizer in program.optimizers for layer in optimizer.layers]
    if len({*layers}) < len(layers):
        return "several optimizers of the same parameters"
    options = arguments_of(program.optimizers[0])
    strategy = options.get("strategy", mpisgd.Synchronous())
    is_local = not averages_gradients(program.optimizers[0])
    compression, cap = _compression_in(options), program.optimizers[0].option("bucket_cap_bytes")
    codes = codes_between_hosts(program)
    sent = _sent_by(compression) if not codes else strategy.paper(program.ranks)
    has_buckets = codes or len(program.layers) == 1 or cap == "1"
    compresses = not isinstance(sent, Synchronous) and (has_buckets or not sent.of_buckets)
    reduces = compresses or options.get("op") is mpisgd.Adasum
    if not (is_local or reduces):
        return "no paper of what buckets have together, unless each parameter has its own"
    has_sparse = any("sparse" in layer.kind for layer in program.layers)
    if has_sparse and compresses and not is_local:
        return "sparse gradients travel as they are, and the paper compresses all"
    if why := _why_no_paper(program, strategy):
        return why
    if is_local and sent.of_buckets and cap not in ("", "1"):
        return "what is drawn depends on the buckets"
    warms_up = getattr(strategy, "warmup_steps", 0) > 0
    if warms_up and sent.of_buckets and not has_buckets:
        return "what is drawn in a warm-up depends on the order in which backward has had gradients"
    if _loses_what_leads(program, compression) and (sent.counts or isinstance(sent, PowerSGD)):
        return "what the first ranks of hosts have alike no other rank has, nor another number of them gets"
    keeps_nothing = codes and strategy.parameters is None
    if reduces and not is_local and not _reduces_once(program, keeps_nothing=keeps_nothing):
        return "a step with several reductions, or with none"
    makes_equals = any(isinstance(event, events.Clip) and event.by_value for event in program.events)
    if sent.chooses and (program.exact or makes_equals):
        return "among equals it chooses whichever it likes"
    if program.exact and codes and program.is_uneven:
        return "what is weighted may be as near to one multiple of a scale as to the next"
    # Where ranks average parameters, what is frozen stays in its bucket, and what is added comes into one.
    regrouping = () if is_local and cap != "1" else (events.AddGroup,) if is_local else CHANGE_BUCKETS
    regroups = any(isinstance(event, regrouping) for event in program.events)
    if (sent.counts or getattr(sent, "T", 0) > 0) and regroups:
        return "what signs zeros have, and what is drawn, depends on how many reductions a bucket had"
    moves = any(isinstance(event, events.Convert) for event in program.events)
    if sent.of_memory and (moves or any(layer.transposed for layer in program.layers)):
        return "it approximates, draws for or cuts what lies in memory"
    dtypes = {each.dtype for each in (*program.layers, *program.events) if hasattr(each, "dtype")}
    if rounds(program) and dtypes - {"", "float64"}:
        return "it rounds what a narrow dtype has rounded"
    return ""


def _loses_what_leads(program: Program, compression: mpisgd.Compressor | None) -> bool:
    """Return whether what only the first ranks of hosts have is lost, as another one's state is taken."""
    is_sent = any(isinstance(event, events.Broadcast) for event in program.events)
    return isinstance(compression, mpisgd.compress.PerHost) and (is_sent or program.is_resized)


def rounds(program: Program) -> bool:
    """Return whether a method computes with gradients what is rounded, such as a mean of magnitudes."""
    options = [arguments_of(optimizer) for optimizer in program.optimizers]
    return codes_between_hosts(program) or any(
        each.get("op") is mpisgd.Adasum or _sent_by(_compression_in(each)).rounds for each in options
    )


def codes_between_hosts(program: Program) -> bool:
    """Return whether a strategy rounds what hosts send each other, where one process would not."""
    if not 0 < program.ranks_per_host < program.ranks:
        return False
    strategies = [optimizer.strategy for optimizer in program.optimizers]
    return any(map(has_codes, strategies))


def has_codes(strategy: mpisgd.Strategy) -> bool:
    """Return whether what a strategy sends between hosts is rounded."""
    if not isinstance(strategy, mpisgd.Sharded):
        return False
    return strategy.gradients is not None or strategy.parameters is not None


def _compression_in(options: dict[str, Any]) -> mpisgd.Compressor | None:
    """Return the compressor: the strategy's own, or the one that is asked for."""
    strategy = options.get("strategy")
    own = None if strategy is None else strategy.own_compression
    return options.get("compression") if own is None else own


def _sent_by(compression: mpisgd.Compressor | None) -> Paper[Any]:
    """Return the paper of what travels, inside of `PerHost`, too; a cast is compared as what it rounds."""
    inner: mpisgd.Compressor | None = getattr(compression, "compressor", compression)
    try:
        found: Paper[Any] = Synchronous() if inner is None else inner.paper()
    except mpisgd.InvalidArgument:
        return Synchronous()
    return Synchronous() if isinstance(inner, Casting) else found


def _why_no_paper(program: Program, strategy: Any) -> str:
    added = any(isinstance(event, events.AddGroup) for event in program.events)
    has_empty = any(0 in layer.shape for layer in program.layers)
    if (added or has_empty) and getattr(strategy, "fragments", 1) > 1:
        kinds = [type(event) for event in program.events]
        if has_empty or events.AddGroup in kinds[: kinds.index(events.Step)]:
            return "the paper's fragments are those of the beginning, and all have elements"
    closures = any(getattr(event, "closure", ()) for event in program.events)
    warms_up = getattr(strategy, "warmup_steps", 0)
    if closures and getattr(strategy, "learners", "rank") != "rank":
        return "the ranks of a learner average what each call of a closure leaves"
    looks = closures or any(isinstance(event, events.Clip | events.SetGradient) for event in program.events)
    if program.scaler and looks and getattr(strategy, "learners", "rank") != "rank":
        return "what ranks of a learner average has the scale, and a change of gradients is of unscaled ones"
    if warms_up and (program.scaler or looks):
        return "something looks at gradients that are reduced by then"
    if program.optimizers[0].name in CLOSED and getattr(strategy, "style", "") == "combine_then_adapt":
        return "the first gradients of a step are of what the ranks have before, and the others are not"
    try:
        for place in range(len(program.optimizers)):
            paper_among(program, program.ranks, place)
    except mpisgd.InvalidArgument as exc:
        return str(exc).partition(" [mpisgd:")[0]
    return ""


def _reduces_once(program: Program, *, keeps_nothing: bool) -> bool:
    """Return whether there is one reduction for each step, of all that came since the last reset.

    Args:
        program: what is carried out.
        keeps_nothing: whether a reduction leaves nothing behind: it may be of a power of two times the
            gradients, if nobody looks at it, and of some that are reset.
    """
    looks = any(isinstance(event, events.Clip | events.SetGradient) for event in program.events)
    if program.scaler and (looks or not keeps_nothing):
        return False
    passes, has_new, is_reduced = 0, False, False
    for event in program.events:
        match event:
            case events.Backward():
                if is_reduced:
                    return False
                has_new, passes = True, passes + (not event.no_sync)
                is_reduced = not event.no_sync and passes == program.optimizers[0].passes
            case events.Step(closure=data):
                if data or not has_new:
                    return False
                has_new, is_reduced = False, True
            case events.Clip() | events.Synchronize():
                is_reduced = True
                if not has_new:
                    return False
            case events.FailedBackward() if keeps_nothing:
                passes, has_new, is_reduced = 0, False, False
            case events.ZeroGrad(by_model=True, set_to_none=False) | events.FailedBackward():
                return False
            case events.SetGradient(exists=False):  # where all are None, a step reduces as after a reset
                return False
            case events.ZeroGrad() | events.Reload():
                if has_new:
                    return False
                passes, is_reduced = 0, False
            case events.Broadcast() | events.AddGroup() | events.Convert():
                if has_new:
                    return False
    return True
