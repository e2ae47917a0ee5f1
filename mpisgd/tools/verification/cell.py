"""`Cell`: a mode tried by some ranks, and how far it was from what it must be equal to."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import mpisgd
from mpisgd.tools.verification.mode import Reference
from mpisgd.tools.verification.problem import flat_parameters
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trainer import Trainer
from mpisgd.tools.verification.trial import Trial

__all__ = ["CANNOT_TELL", "Cell", "Comparison", "compare", "flaw_anywhere", "try_mode"]

OF_A_STEP = "a hundredth of what the step moves; another order of additions may drift more"
CANNOT_TELL = (
    "more than a hundredth of what the step moved, and no more than another order of the same additions can "
    "make; take a finer dtype, or steps that move more"
)


class Cell(NamedTuple):
    """What was found.

    Attributes:
        family: of the mode.
        mode: its name.
        ranks: how many tried it.
        transport: how they reached each other.
        dtype: of the model.
        sabotage: what was broken on purpose.
        difference: the largest of all ranks, steps and parameters; infinite where it failed.
        tolerance: what is allowed, in the step that allows most.
        reason: for the tolerance, or the error.
        step: the first one in which the difference was too large, -1 if none.
        counts: False where what was broken changes nothing: `reason` says why.
        undecided: whether it cannot be told if the mode is what it must be. It counts as wrong.
    """

    family: str
    mode: str
    ranks: int
    transport: str
    dtype: str
    sabotage: str
    difference: float
    tolerance: float
    reason: str
    step: int = -1
    counts: bool = True
    undecided: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether the mode is what it must be."""
        return self.step < 0 and self.difference <= self.tolerance

    @property
    def is_as_wanted(self) -> bool:
        """Whether it is equal; or, broken on purpose, whether numbers differ: an error is no sign."""
        if self.sabotage == Sabotage.NONE.value:
            return self.is_equal
        is_found = self.step >= 0 and not self.undecided and self.difference < math.inf
        return not self.counts or is_found


def try_mode(trial: Trial, transport: str, sabotage: Sabotage = Sabotage.NONE) -> Cell:
    """Train with a mode on all ranks, and compare. Collective."""
    (mode, problem, reference), size = trial, mpisgd.size()
    dtype = str(problem.dtype)[6:]
    cell = Cell(mode.family, mode.name, size, transport, dtype, sabotage.value, 0.0, 0.0, "")
    if not sabotage.applies(size):
        return cell._replace(reason="one rank has nobody to communicate with", counts=False)
    if reference.flaw:
        return cell._replace(difference=float("inf"), reason=f"the reference: {reference.flaw}")
    trainer = Trainer(problem, sabotage, stale_gradients=mode.stale_gradients)
    try:
        mine = mode.train(trainer)
    except mpisgd.MpisgdError as exc:  # alike on all ranks, or the job ends
        return cell._replace(difference=float("inf"), reason=f"{type(exc).__name__}: {exc}")
    if _anywhere(trainer.is_idle):
        return cell._replace(reason="the rank that is broken has no part of the parameters", counts=False)
    found = compare(mine, reference, flat_parameters(problem.model()))
    return cell._replace(
        difference=found.difference,
        tolerance=found.tolerance,
        reason=CANNOT_TELL if found.undecided else found.reason,
        step=found.step,
        undecided=found.undecided,
    )


def _anywhere(mine: bool) -> bool:
    """Return whether it is true on some rank. Collective."""
    flag = torch.tensor(mine)
    mpisgd.all_reduce(flag, mpisgd.ReduceOp.MAX)
    return bool(flag)


def flaw_anywhere(reference: Reference) -> str:
    """Return why nothing can be compared with the reference of the first rank that knows. Collective.

    What is random differs between ranks, which must come to the same answer.
    """
    flaws = [""] * mpisgd.size()
    mpisgd.all_gather_object(flaws, reference.flaw)
    return next(filter(None, flaws), "")


class Comparison(NamedTuple):
    """What `compare` found; the same on all ranks.

    Attributes:
        difference: the largest of all ranks, steps and parameters.
        tolerance: what the step allows that allows most.
        step: the first one in which the difference was too large, -1 if none.
        reason: where the tolerance comes from.
        undecided: whether it is not more than the order of additions explains, and too much to tell.
    """

    difference: float
    tolerance: float
    step: int
    reason: str
    undecided: bool


def compare(mine: Tensor, reference: Reference, start: Tensor) -> Comparison:
    """Compare the parameters after each step, on all ranks. Collective.

    Args:
        mine: this rank's, [steps, numel].
        reference: a sound one, alike on all ranks.
        start: the parameters before the first step, [numel].
    """
    apart = (mine - reference.of_rank(mpisgd.rank())).abs().amax(dim=1).double()
    apart = torch.where(apart.isfinite(), apart, torch.inf)
    mpisgd.all_reduce(apart, mpisgd.ReduceOp.MAX)
    allowed = reference.allowed(start)
    wrong = (apart > allowed).nonzero()
    step = int(wrong[0]) if len(wrong) else -1
    undecided = step >= 0 and not bool((apart > reference.tolerance).any())
    tolerance = float(allowed.max())
    reason = OF_A_STEP if tolerance < reference.tolerance else reference.reason
    return Comparison(float(apart.max()), tolerance, step, reason, undecided)
