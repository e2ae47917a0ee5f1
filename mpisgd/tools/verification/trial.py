"""`Trial`: a mode, what it trains, and what that must be equal to; the ranks compute references in turn.

A reference is a training of all ranks in one process, done twice: if each rank computed all of them, most of
the time of `verify` would go there.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

import mpisgd
from mpisgd import config
from mpisgd.errors import MpisgdError
from mpisgd.tools.verification.mode import Mode, Reference
from mpisgd.tools.verification.problem import Problem

__all__ = ["Trial", "trials_of"]

STEPS, QUICK_STEPS = 20, 6


class Trial(NamedTuple):
    """What the ranks of this job try.

    Attributes:
        mode: how they train.
        problem: what they train.
        reference: what the parameters must be; the same on all ranks.
    """

    mode: Mode
    problem: Problem
    reference: Reference


def trials_of(modes: Iterable[tuple[Mode, torch.dtype]], *, quick: bool) -> list[Trial]:
    """Return the trials of those modes that make sense here. Collective.

    Each rank computes some of the references and sends them to the others.

    Args:
        modes: with the dtype of the model.
        quick: fewer steps.
    """
    rank, size, num_nodes = mpisgd.rank(), mpisgd.size(), mpisgd.num_nodes()
    shared_memory, steps = config.shared_memory(), QUICK_STEPS if quick else STEPS
    here = [
        (mode, mode.problem(size, steps, dtype))
        for mode, dtype in modes
        if mode.applies(size, num_nodes, shared_memory=shared_memory)
    ]
    parts: list[list[Reference]] = [[] for _ in range(size)]
    mpisgd.all_gather_object(parts, [_reference(mode, problem) for mode, problem in here[rank::size]])
    return [Trial(*each, parts[place % size][place // size]) for place, each in enumerate(here)]


def _reference(mode: Mode, problem: Problem) -> Reference:
    try:
        return mode.reference(problem)
    except MpisgdError as exc:
        return Reference(torch.empty(0), 0.0, "", f"{type(exc).__name__}: {exc}")
