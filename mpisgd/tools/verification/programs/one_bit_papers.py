"""Papers of optimizers that average by themselves, with the settings of a program's optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from dataclasses import replace
from functools import partial
from typing import Any

from mpisgd.methods.one_bit_adam.paper import OneBitAdam
from mpisgd.methods.one_bit_lamb.paper import OneBitLamb
from mpisgd.methods.paper_kit import Paper, Vec
from mpisgd.methods.two_step.paper import TwoStep
from mpisgd.methods.zero_one_adam.paper import ZeroOneAdam
from mpisgd.tools.verification.draws import Buckets
from mpisgd.tools.verification.paper_run import Definition
from mpisgd.tools.verification.papers import in_order
from mpisgd.tools.verification.programs import events
from mpisgd.tools.verification.programs.program import Optimizer, Program
from mpisgd.tools.verification.programs.training import SERIAL

__all__ = ["definition_of_optimizer", "is_adam", "why_no_paper"]

NEVER = 100  # steps; up to then two of the three that travel by one bit are Adam
STEPS = 1000  # of a program, at most
LOCAL = "ZeroOneAdam"  # between whose meetings ranks have parameters of their own
CLIPPER = 16  # its default

Rate = Callable[[int], float]


def is_adam(optimizer: Optimizer) -> bool:
    """Return whether nothing of an optimizer travels by one bit, so that one process has torch's Adam."""
    settings = dict(optimizer.settings)
    never = settings.get("freeze_step", settings.get("var_freeze_step")) == NEVER
    return never and "Lamb" not in optimizer.name


def definition_of_optimizer(program: Program, rate: Rate) -> Definition:
    """Return what the first optimizer of a program, which averages by itself, is to be equal to.

    Args:
        program: one that `why_no_paper` has nothing against.
        rate: the learning rate of a step that is under way.
    """
    optimizer = program.optimizers[0]
    unused = {f"layers.{place}" for place, layer in enumerate(program.layers) if layer.used_by == "none"}
    paper = _paper_of(dict(optimizer.settings), optimizer.name, rate)
    return Definition(paper, TwoStep(), partial(_by_dtype, unused))


def _by_dtype(unused: Collection[str], x: Vec) -> Buckets:
    """Return a bucket for each dtype, of the parameters that have gradients, in their order."""
    sent = Vec({name: tensor for name, tensor in x.items() if name not in unused})
    dtypes = dict.fromkeys(tensor.dtype for tensor in sent.values())
    parts = (Vec({name: each for name, each in sent.items() if each.dtype == dtype}) for dtype in dtypes)
    return tuple(bucket for part in parts for bucket in in_order(part))


def _paper_of(settings: dict[str, Any], name: str, rate: Rate) -> Paper[Any]:
    (b1, b2), eps = settings.get("betas", (0.9, 0.999)), settings.get("eps", 1e-8)
    if name == LOCAL:
        return ZeroOneAdam(_renewals(settings), _meetings(settings), rate, b1, b2, eps)
    freeze, decay = settings["freeze_step"], settings.get("weight_decay", 0.0)
    if name == "OneBitAdam":
        return OneBitAdam(freeze, rate, b1, b2, eps, decay)
    lamb = OneBitLamb(freeze, rate, b1, b2, eps, decay)
    return replace(
        lamb,
        b3=settings.get("coeff_beta", lamb.b3),
        q=settings.get("factor_threshold", lamb.q),
        c_limits=_limits(settings, ("min_coeff", "max_coeff"), lamb.c_limits),
        r_limits=_limits(settings, ("factor_min", "factor_max"), lamb.r_limits),
    )


def _limits(
    settings: dict[str, Any], names: tuple[str, str], otherwise: tuple[float, float]
) -> tuple[float, float]:
    least, most = (settings.get(name, value) for name, value in zip(names, otherwise, strict=True))
    return least, most


def _renewals(settings: dict[str, Any]) -> Container[int]:
    """Return the steps T_v: the j-th, from 0 on, is followed by one 2^(j // scaler) steps later."""
    steps = [1]
    while steps[-1] < STEPS:
        steps.append(steps[-1] + 2 ** ((len(steps) - 1) // settings["var_update_scaler"]))
    return {step for step in steps if step <= settings["var_freeze_step"]}


def _meetings(settings: dict[str, Any]) -> Container[int]:
    """Return the steps T_u: all up to the freeze; then an interval that doubles after each `scaler` steps."""
    frozen, scaler = settings["var_freeze_step"], settings["local_step_scaler"]
    clipper = settings.get("local_step_clipper", CLIPPER)
    later = {k for k in range(1, STEPS) if k % min(clipper, 2 ** ((k - 1) // scaler)) == 0}
    return {*range(1, frozen + 1), *(frozen + k for k in later)}


def why_no_paper(program: Program) -> str:
    """Return why an optimizer that averages by itself has no paper in a program, "" if it has one."""
    optimizer = program.optimizers[0]
    if optimizer.name == SERIAL or is_adam(optimizer):
        return "one process has a definition of it"
    layers = [program.layers[layer] for layer in optimizer.layers]
    if len({layer.scaled for layer in layers}) > 1:
        return "the paper has one learning rate"
    if optimizer.name == "OneBitLamb":
        if any(0 in layer.shape for layer in layers):
            return "no elements have no largest quotient"
        kinds = [type(each) for each in program.events]
        if events.AddGroup in kinds and events.Step in kinds[: kinds.index(events.AddGroup)]:
            return "the paper's mean of factors begins with all parameters"
    if _goes_on_with_means(program):
        return "steps of Adam leave the mean as each rank's gradient, and what is added to it differs by rank"
    skips = program.loses or any(getattr(each, "skipped", ()) for each in program.events)
    sometimes = {layer.used_by for layer in layers} - {"all", "none"}
    if (
        "odd" in sometimes
        or (sometimes and skips)
        or any(isinstance(each, events.SetFrozen) for each in program.events)
    ):
        return "a parameter without a gradient counts one step less, and the paper counts those of all"
    if optimizer.name == LOCAL:
        adds = any(isinstance(each, events.AddGroup) for each in program.events)
        if adds or any(layer.frozen or layer.used_by != "all" for layer in layers):
            return "a step in which a parameter has its first gradient is one more renewal"
        if any(isinstance(each, events.Reload | events.Broadcast) for each in program.events):
            return "a state has the mean of the momenta, from which all ranks go on"
    return ""


def _goes_on_with_means(program: Program) -> bool:
    """Return whether gradients of one step are used or added to after it."""
    is_used = False
    for event in program.events:
        match event:
            case events.Step(closure=data):
                if is_used and not data:
                    return True
                is_used = True
            case events.Backward() if is_used:
                return True
            case events.ZeroGrad() | events.FailedBackward() | events.Reload():
                is_used = False
    return False
