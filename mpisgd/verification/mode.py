"""`Mode`: one way of training, and what it must be equal to."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.verification.problem import Problem, standard_problem, turned
from mpisgd.verification.trainee import Trainee

__all__ = ["TURNED", "Mode", "Reference", "between_orders"]

FACTOR = 50.0  # of the drift that another order of the same additions makes
TURNED = "examples of each rank added up from the last to the first"
UNITS = 16.0  # of the last place of the largest number, at least


class Reference(NamedTuple):
    """What a mode is compared with.

    Attributes:
        expected: the parameters after each step: [steps, numel], or [size, steps, numel].
        tolerance: the largest difference allowed.
        reason: where the tolerance comes from.
    """

    expected: Tensor
    tolerance: float
    reason: str

    def of_rank(self, rank: int) -> Tensor:
        """Return what a rank must have, [steps, numel]."""
        return self.expected if self.expected.dim() == 2 else self.expected[rank]


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
    """

    name: str
    family: str
    train: Callable[[Trainee], Tensor]
    reference: Callable[[Problem], Reference]
    sizes: tuple[int, int] = (1, 2**31)
    dtypes: tuple[torch.dtype, ...] = (torch.float64, torch.float32)
    quick: bool = True
    problem: Callable[[int, int, torch.dtype], Problem] = standard_problem
    stale_gradients: bool = False
    hosts: int = 1
    loses_rank: bool = False
    shares_memory: bool = False

    def applies(self, size: int, num_nodes: int = 1, *, shared_memory: bool = True) -> bool:
        """Return whether it makes sense with so many ranks on so many hosts."""
        least, most = self.sizes
        has_memory = num_nodes == 1 and shared_memory
        return least <= size <= most and num_nodes >= self.hosts and has_memory >= self.shares_memory


def between_orders(
    simulate: Callable[[Problem, int], Tensor],
    how: str = "ranks, and examples, added up from the last to the first",
) -> Callable[[Problem], Reference]:
    """Return the reference of a simulation that can add up in two orders.

    In the second the examples of each rank are turned, too: the sum of two ranks has one order only.

    Args:
        simulate: of a problem, and 1 or -1, the order.
        how: what is different in the order -1.
    """

    def reference(problem: Problem) -> Reference:
        return _within(simulate(problem, 1), simulate(turned(problem), -1), how)

    return reference


def _within(expected: Tensor, other: Tensor, how: str) -> Reference:
    drift = float((expected - other).abs().max())
    least = UNITS * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    if FACTOR * drift > least:
        return Reference(expected, FACTOR * drift, f"{FACTOR:.0f} x the drift of {drift:.1e}: {how}")
    return Reference(expected, least, f"{UNITS:.0f} units in the last place; another order drifts less")
