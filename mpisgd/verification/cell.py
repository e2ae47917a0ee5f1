"""`Cell`: a mode tried by some ranks, and how far it was from what it must be equal to."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

import mpisgd
from mpisgd import config
from mpisgd.verification.mode import Mode, Reference
from mpisgd.verification.sabotage import Sabotage
from mpisgd.verification.trainee import Trainee

__all__ = ["Cell", "compare", "try_mode"]

STEPS, QUICK_STEPS = 20, 6


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
        tolerance: what is allowed.
        reason: for the tolerance, or the error.
        step: the first one in which the difference was too large, -1 if none.
        counts: False where what was broken changes nothing: `reason` says why.
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

    @property
    def is_equal(self) -> bool:
        """Whether the mode is what it must be."""
        return self.difference <= self.tolerance

    @property
    def is_as_wanted(self) -> bool:
        """Whether it is equal; or, broken on purpose, whether numbers differ: an error is no sign."""
        if self.sabotage == Sabotage.NONE.value:
            return self.is_equal
        return not self.counts or self.tolerance < self.difference < math.inf


def try_mode(
    mode: Mode, dtype: torch.dtype, transport: str, *, quick: bool, sabotage: Sabotage = Sabotage.NONE
) -> Cell | None:
    """Train with a mode on all ranks, and compare; None where the mode makes no sense. Collective."""
    size = mpisgd.size()
    if not mode.applies(size, mpisgd.num_nodes(), shared_memory=config.shared_memory()):
        return None
    cell = Cell(mode.family, mode.name, size, transport, str(dtype)[6:], sabotage.value, 0.0, 0.0, "")
    if not sabotage.applies(size):
        return cell._replace(reason="one rank has nobody to communicate with", counts=False)
    problem = mode.problem(size, QUICK_STEPS if quick else STEPS, dtype)
    trainee = Trainee(problem, sabotage, stale_gradients=mode.stale_gradients)
    try:
        reference = mode.reference(problem)
        mine = mode.train(trainee)
    except mpisgd.MpisgdError as exc:  # alike on all ranks, or the job ends
        return cell._replace(difference=float("inf"), reason=f"{type(exc).__name__}: {exc}")
    if _anywhere(trainee.is_idle):
        return cell._replace(reason="the rank that is broken has no part of the parameters", counts=False)
    difference, step = compare(mine, reference)
    return cell._replace(
        difference=difference, tolerance=reference.tolerance, reason=reference.reason, step=step
    )


def _anywhere(mine: bool) -> bool:
    """Return whether it is true on some rank. Collective."""
    flag = torch.tensor(mine)
    mpisgd.all_reduce(flag, mpisgd.ReduceOp.MAX)
    return bool(flag)


def compare(mine: Tensor, reference: Reference) -> tuple[float, int]:
    """Return the largest difference on any rank, and the first step beyond the tolerance. Collective."""
    apart = (mine - reference.of_rank(mpisgd.rank())).abs().amax(dim=1).double()
    apart = torch.where(apart.isfinite(), apart, torch.inf)
    mpisgd.all_reduce(apart, mpisgd.ReduceOp.MAX)
    wrong = (apart > reference.tolerance).nonzero()
    return float(apart.max()), int(wrong[0]) if len(wrong) else -1
