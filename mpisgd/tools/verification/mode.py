"""`Mode`: one way of training, and what it must be equal to."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.tools.verification.problem import Problem, standard_problem, turned
from mpisgd.tools.verification.trainer import Trainer

__all__ = ["JOINED", "RANDOM", "TURNED", "Mode", "Reference", "between_orders", "flaw_of"]

FACTOR = 50.0  # of the drift that another order of the same additions makes
JOINED = "examples added up from the last to the first"
TURNED = "examples of each rank added up from the last to the first"
UNITS = 16.0  # of the last place of the largest number, at least
RANDOM = (
    "something in model or loss is random, as dropout is; switch it off by model.eval(), or seed it alike in "
    "the loss"
)
SHARE = 0.01  # of what a step moves, at most: else a step without communication could pass


class Reference(NamedTuple):
    """What a mode is compared with.

    Attributes:
        expected: the parameters after each step: [steps, numel], or [size, steps, numel].
        tolerance: the largest difference that another order of the same additions may make.
        reason: where the tolerance comes from.
        flaw: why nothing can be compared with it, "" if it can.
    """

    expected: Tensor
    tolerance: float
    reason: str
    flaw: str = ""

    def of_rank(self, rank: int) -> Tensor:
        """Return the parameters that a rank must have, [steps, numel]."""
        return self.expected if self.expected.dim() == 2 else self.expected[rank]

    def allowed(self, start: Tensor) -> Tensor:
        """Return the largest difference that each step allows, [steps]: the tolerance, or less.

        Never more than a hundredth of what the step moved, or the last one before it that moved anything.

        Args:
            start: the parameters before the first step, [numel].
        """
        ranks = self.expected if self.expected.dim() == 3 else self.expected.unsqueeze(0)
        values = ranks[..., : len(start)].double()  # what comes after the parameters does not move
        begun = start.double().expand(len(values), 1, -1)
        moved = torch.cat([begun, values], dim=1).diff(dim=1).abs().amax(dim=(0, 2))
        limits = [0.0]
        for distance in moved.tolist():
            limits.append(SHARE * distance or limits[-1])
        return moved.new_tensor(limits[1:]).clamp(max=self.tolerance)


def flaw_of(expected: Tensor, again: Tensor | None = None) -> str:
    """Return why nothing can be compared with a reference, "" if it can.

    Args:
        expected: the parameters after each step.
        again: what the same training gave when it was done once more.
    """
    finite = expected.isfinite()
    if not finite.all():
        rows = finite.all(dim=-1)
        step = int((~(rows if rows.dim() == 1 else rows.all(dim=0))).nonzero()[0])
        return (
            f"it is not finite from step {step} on, and nothing is equal to a NaN or an infinity; "
            "take a smaller learning rate, or fewer steps"
        )
    if again is not None and not torch.equal(expected, again):
        return (
            f"done twice it gave parameters that are {float((expected - again).abs().max()):.1e} apart: "
            f"{RANDOM}"
        )
    return ""


class Mode(NamedTuple):
    """One row of the matrix.

    Attributes:
        name: of the row.
        family: under which heading it stands.
        train: returns this rank's parameters after each step, [steps, numel]. Collective.
        reference: what they must be, and how closely; without any communication.
        sizes: numbers of ranks with which it makes sense: the least and the most.
        dtypes: with which it makes sense.
        quick: whether it is a part of `--quick`.
        problem: what is trained, made of the number of ranks, the steps and the dtype.
        stale_gradients: whether gradients are stale where something is to be, and not parameters.
        hosts: the least number of hosts with which it makes sense.
        loses_rank: whether a rank is killed, for which it needs a job of its own.
        shares_memory: whether all ranks must have memory in common.
        power_of_two: whether the number of ranks must be one.
        loads_much: whether it needs parts of torch that take longer to load than many modes take: DTensor, or
            the compiler, which DistributedDataParallel looks for.
    """

    name: str
    family: str
    train: Callable[[Trainer], Tensor]
    reference: Callable[[Problem], Reference]
    sizes: tuple[int, int] = (1, 2**31)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    quick: bool = True
    problem: Callable[[int, int, torch.dtype], Problem] = standard_problem
    stale_gradients: bool = False
    hosts: int = 1
    loses_rank: bool = False
    shares_memory: bool = False
    power_of_two: bool = False
    loads_much: bool = False

    def applies(self, size: int, num_nodes: int = 1, *, shared_memory: bool = True) -> bool:
        """Return whether it makes sense with so many ranks on so many hosts."""
        least, most = self.sizes
        has_memory = num_nodes == 1 and shared_memory
        fits = least <= size <= most and (size & (size - 1) == 0) >= self.power_of_two
        return fits and num_nodes >= self.hosts and has_memory >= self.shares_memory


def between_orders(
    simulate: Callable[[Problem, int], Tensor],
    how: str = "ranks, and examples, added up from the last to the first",
    *,
    repeats: bool = False,
) -> Callable[[Problem], Reference]:
    """Return the reference of a simulation that can add up in two orders.

    In the second the examples of each rank are turned, too: the sum of two ranks has one order only.

    Args:
        simulate: of a problem, and 1 or -1, the order.
        how: what is different in the order -1.
        repeats: whether the order 1 is simulated twice, since a user's model may be random.
    """

    def reference(problem: Problem) -> Reference:
        expected = simulate(problem, 1)
        if flaw := flaw_of(expected, simulate(problem, 1) if repeats else None):
            return Reference(expected, 0.0, "", flaw)
        return _within(expected, simulate(turned(problem), -1), how)

    return reference


def _within(expected: Tensor, other: Tensor, how: str) -> Reference:
    if flaw := flaw_of(other):
        return Reference(expected, 0.0, "", f"with {how}, {flaw}")
    drift = float((expected - other).abs().max())
    least = UNITS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    if FACTOR * drift > least:
        return Reference(expected, FACTOR * drift, f"{FACTOR:.0f} x the drift of {drift:.1e}: {how}")
    return Reference(expected, least, f"{UNITS:.0f} units in the last place; another order drifts less")
