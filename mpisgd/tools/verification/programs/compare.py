"""What a rank has seen, and what is concluded from what all of them have.

Each rank compares its run with the reference and with the variants of the program, and hands over an
`Outcome`; `judge` needs those of all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mpisgd.tools.verification.programs.execute import Failure, Run, digest, state_digest
from mpisgd.tools.verification.programs.program import ONE_BIT, Optimizer, Program
from mpisgd.tools.verification.programs.serial_definition import rounds
from mpisgd.tools.verification.programs.training import SERIAL
from mpisgd.tools.verification.programs.variants import same_bits

__all__ = ["Outcome", "Verdict", "judge", "observe"]

# What another order of additions makes of some steps in float64: see "What makes a number honest" in
# DESIGN.md. Where the momentum of Dion has a lower rank than what is taken of it, columns of rounding (1e-16)
# are divided by their norm and eps (1e-8); those beyond COLUMNS add up.
DRIFT = {"SGD": 1e-11, "Adagrad": 1e-7, "RMSprop": 1e-9, "LBFGS": 1e-7, "Dion": 1e-7}
OTHER_DRIFT = 1e-9
COLUMNS = 10
# What LBFGS keeps of curvature, and the direction that comes of it: quotients of differences of gradients,
# which of a nearly linear loss are mostly rounding.
QUOTIENTS, QUOTIENT_DRIFT = ("d", "ro", "al", "H_diag"), 1e-3
SINGLE_DRIFT = 1e-5  # where the loss has parts in float32, which has 29 bits less
SINGLE_MUON_DRIFT = 1e-3  # torch's Muon rounds to bfloat16, which 1e-7 may turn into the next number
SHARE = 0.01  # of what a step moves: else one without communication might pass
ROUNDING = 1e-12  # moves parameters of float64 so far at most,
LAST_PLACES = 4  # and others so many times the last place of 1
REFUSALS = ("InvalidArgument", "UnsupportedTensor", "UnsupportedOp")


@dataclass(frozen=True)
class Outcome:
    """What one rank has seen.

    Attributes:
        bits: hashes of the parameters, by event.
        state_bits: a hash of the states after the last event; "" where it did not come to that.
        wrong: in words, where the parameters or the states are not those of the reference; "" nowhere.
        wrong_variant: the same for the variants of the program.
        failure: of the run.
        reference_failure: of the reference, which makes the program impossible.
    """

    bits: tuple[tuple[int, str], ...]
    state_bits: str = ""
    wrong: str = ""
    wrong_variant: str = ""
    failure: Failure | None = None
    reference_failure: Failure | None = None


@dataclass(frozen=True)
class Verdict:
    """What became of a program.

    Attributes:
        kind: "ok", "refused", or what is wrong: "values", "bits", "variant", "no reference", "error NAME",
            "hang", "crash", "crash NAME".
        text: in words.
        is_healthy: whether the job can run other programs.
        bits: of each rank: hashes of its parameters, by event, and of its states.
    """

    kind: str
    text: str = ""
    is_healthy: bool = True
    bits: tuple[tuple[tuple[tuple[int, str], ...], str], ...] = field(default=(), repr=False)

    @property
    def is_fault(self) -> bool:
        """Whether something is wrong."""
        return self.kind not in ("ok", "refused")


def observe(
    program: Program, run: Run, reference: Run | None, variants: Sequence[tuple[str, Run]]
) -> Outcome:
    """Compare what this rank has with what it should have.

    Args:
        program: which was run.
        run: of this rank.
        reference: of one process, where there is one.
        variants: runs that must end alike, each with the word for what was changed.
    """
    bits = tuple((event, digest(params)) for event, params in run.params.items())
    state_bits = state_digest(run.states) if run.failure is None else ""
    if reference is None:
        return Outcome(bits, state_bits, _not_finite(run), _differing(program, run, variants), run.failure)
    wrong = difference(program, run, reference) if reference.failure is None else ""
    return Outcome(
        bits, state_bits, wrong, _differing(program, run, variants), run.failure, reference.failure
    )


def _not_finite(run: Run) -> str:
    """Return where parameters are not finite, "" if nowhere: two trainings that end so say nothing."""
    for event, params in run.params.items():
        if not all(bool(param.isfinite().all()) for param in params):
            return f"after event {event}: not finite, so that nothing can be compared"
    return ""


def difference(program: Program, run: Run, reference: Run) -> str:
    """Return where a run is not what it should be, "" if nowhere."""
    allowed, limits = drift(program), _limits(reference)
    for event, params in run.params.items():
        for place, (mine, right) in enumerate(zip(params, reference.params[event], strict=True)):
            if off := _off(mine, right, allowed, limits[event]):
                what = program.events[event] if event >= 0 else "the beginning"
                return f"after event {event}, {what}: layer {place} {off}"
    if run.failure is not None or not run.states or any(o.name in ONE_BIT for o in program.optimizers):
        return ""
    for number, (state, other) in enumerate(zip(run.states, reference.states, strict=True)):
        if off := _state_off(state["state"], other["state"], allowed):
            return f"at the end: the state of optimizer {number}, {off}"
    return ""


def _limits(reference: Run) -> dict[int, float]:
    """Return the most that an event may be off by, whatever the drift: a hundredth of what it moved.

    Where it moved nothing, or as much as a mean of equal numbers does, that is what the last one allows that
    did.
    """
    limits, before, last = dict[int, float](), list[Tensor](), math.inf
    for event, params in reference.params.items():
        pairs = [pair for pair in zip(before, params, strict=bool(before)) if pair[0].numel()]
        moved = max((_moved(one, other) for one, other in pairs), default=0.0)
        last = SHARE * moved if moved else last
        limits[event], before = last, params
    return limits


def _moved(before: Tensor, after: Tensor) -> float:
    """Return how far a parameter has moved, 0 if rounding alone may have moved it."""
    least = ROUNDING if after.dtype is torch.float64 else LAST_PLACES * torch.finfo(after.dtype).eps
    distance = float((before.double() - after.double()).abs().max())
    return distance if distance > least else 0.0


def drift(program: Program) -> float:
    """Return by how much values may differ, relative to 1 and to themselves."""
    if program.exact and not rounds(program):
        return 0.0
    single = [layer for layer in program.layers if layer.dtype == "float32"]
    of_muon = any(o.name == "MuonWithAdamW" for o in program.optimizers)
    of_muon &= any(len(layer.shape) == 2 for layer in single)
    of_single = SINGLE_MUON_DRIFT if of_muon else SINGLE_DRIFT if single else 0.0
    return max(of_single, *(_drift_of(program, each) for each in program.optimizers))


def _drift_of(program: Program, optimizer: Optimizer) -> float:
    least = DRIFT.get(optimizer.name, OTHER_DRIFT)
    if optimizer.name != SERIAL:
        return least
    shapes = [program.layers[place].shape for place in optimizer.layers]
    return least * max([1.0, *(min(shape) / COLUMNS for shape in shapes if len(shape) == 2)])


def _state_off(mine: dict[int, Any], right: dict[int, Any], allowed: float) -> str:
    if mine.keys() != right.keys():
        return f"which has parameters {sorted(mine)}, not {sorted(right)}"
    for place, entries in right.items():
        if mine[place].keys() != entries.keys():
            return f"which has {sorted(mine[place])} of parameter {place}, not {sorted(entries)}"
        for name, entry in entries.items():
            pairs = zip(_tensors(mine[place][name]), _tensors(entry), strict=True)
            least = QUOTIENT_DRIFT if allowed and name in QUOTIENTS and "prev_flat_grad" in entries else 0.0
            if off := next((off for each in pairs if (off := _off(*each, max(allowed, least)))), ""):
                return f"{name} of parameter {place}, {off}"
    return ""


def _tensors(entry: Any) -> list[Tensor]:
    """Return the numbers and tensors of an entry of a state; LBFGS has lists of them."""
    if isinstance(entry, (list, tuple)):
        return [tensor for each in entry for tensor in _tensors(each)]
    return [torch.zeros(0) if entry is None else torch.as_tensor(entry)]


def _off(mine: Tensor, right: Tensor, allowed: float, most: float = math.inf) -> str:
    mine, right = (tensor.to_dense() if tensor.is_sparse else tensor for tensor in (mine, right))
    if mine.shape != right.shape:
        return f"has the shape {tuple(mine.shape)}, not {tuple(right.shape)}"
    if mine.dtype != right.dtype:
        return f"has the dtype {mine.dtype}, not {right.dtype}"
    if torch.equal(mine, right):
        return ""
    mine, right = mine.double(), right.double()
    distance = (mine - right).abs()
    limit = (allowed * (1 + right.abs())).clamp(max=most)
    wrong = ~(distance <= limit)
    if not bool(wrong.any()):
        return ""
    first = tuple(int(i) for i in wrong.nonzero()[0])
    values = f"{float(mine[first])!r}, not {float(right[first])!r} at {first}"
    return f"is off by up to {float(distance.max()):.3g}: {values}"


def _differing(program: Program, run: Run, variants: Sequence[tuple[str, Run]]) -> str:
    """Return which variant ends with other parameters, or otherwise; "" if none."""
    for name, other in variants:
        kinds = [each.failure and each.failure.kind for each in (run, other)]
        if kinds[0] != kinds[1]:
            return f"{name}: {other.failure} instead of {run.failure}"
        if run.failure is not None or digest(last(run)) == digest(last(other)):
            continue
        if same_bits(program):
            return f"{name}: other bits"
        for place, (mine, right) in enumerate(zip(last(other), last(run), strict=True)):
            if off := _off(mine, right, drift(program)):
                return f"{name}: layer {place} {off}"
    return ""


def last(run: Run) -> list[Tensor]:
    """Return the parameters at the end."""
    return run.params[max(run.params)]


def judge(outcomes: Sequence[Outcome], *, ranks_agree: bool, may_be_refused: bool = True) -> Verdict:
    """Return the outcome of a program.

    Args:
        outcomes: of all ranks.
        ranks_agree: whether the method says that all ranks have the same bits.
        may_be_refused: whether there is a reason to refuse it after the optimizers were made.
    """
    verdict = _judge(outcomes, ranks_agree, may_be_refused)
    return replace(verdict, bits=tuple((outcome.bits, outcome.state_bits) for outcome in outcomes))


def _judge(outcomes: Sequence[Outcome], ranks_agree: bool, may_be_refused: bool) -> Verdict:
    impossible = [o.reference_failure for o in outcomes if o.reference_failure]
    failures = [outcome.failure for outcome in outcomes]
    if impossible and all(failures):
        return Verdict("refused", f"torch: {impossible[0].text}", is_healthy=len(set(failures)) == 1)
    if impossible and not any(failures):
        return Verdict("no reference", f"one process ends with {impossible[0].kind}: {impossible[0].text}")
    alike = len({failure and (failure.event, failure.kind) for failure in failures}) == 1
    first = next((failure for failure in failures if failure), None)
    is_allowed = first is not None and (first.event < 0 or may_be_refused)
    if first and (not alike or first.kind not in REFUSALS or not is_allowed):
        texts = [f"rank {r}: {f.kind} at event {f.event}: {f.text}" for r, f in enumerate(failures) if f]
        kind = next((f.kind for f in failures if f and f.kind != "CollectiveTimeout"), first.kind)
        is_healthy = alike and first.kind in REFUSALS
        return Verdict(f"error {kind}", "\n".join(texts), is_healthy)
    if ranks_agree and (apart := _first_apart(outcomes)):
        return Verdict("bits", apart)
    for kind in ("wrong", "wrong_variant"):
        said = [f"rank {r}: {text}" for r, o in enumerate(outcomes) if (text := getattr(o, kind))]
        if said:
            return Verdict("values" if kind == "wrong" else "variant", "\n".join(said))
    return Verdict("refused", f"{first.kind}: {first.text}") if first else Verdict("ok")


def _first_apart(outcomes: Sequence[Outcome]) -> str:
    """Return where those who took part have different parameters, "" if nowhere."""
    by_event: dict[int, list[str]] = {}
    for outcome in outcomes:
        for event, bits in outcome.bits:
            by_event.setdefault(event, []).append(bits)
    for event, entries in sorted(by_event.items()):
        if len(set(entries)) > 1:
            return f"after event {event} the ranks have different bits: {entries}"
    return ""
