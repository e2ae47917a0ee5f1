"""All modes on the ranks of this job: one cell after the other, and who is told of each."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

import mpisgd
from mpisgd import config
from mpisgd.verification.cell import Cell, try_mode
from mpisgd.verification.mode import Mode
from mpisgd.verification.sabotage import Sabotage

__all__ = ["Plan", "run_here", "transport_here"]

SHARED_MEMORY, MESSAGES = "shared memory", "messages"


class Plan(NamedTuple):
    """What is to be verified.

    Attributes:
        quick: fewer steps, and only modes that say most.
        sabotage: break every mode, to see that its comparison notices.
        only: modes whose family or name contains this text.
    """

    quick: bool = False
    sabotage: bool = False
    only: str = ""

    def modes(self) -> list[Mode]:
        """Return the rows of the matrix.

        Raises:
            JobError: there are none.
        """
        from mpisgd.verification.modes import MODES  # loads torch's parallelism

        chosen = [m for m in MODES if self.only.lower() in f"{m.family} {m.name}".lower()]
        if not chosen:
            raise mpisgd.JobError(f"--only: no mode's name contains {self.only!r}")
        return [mode for mode in chosen if mode.quick] if self.quick and not self.only else chosen

    @property
    def sabotages(self) -> Sequence[Sabotage]:
        """What is done to each mode."""
        return [s for s in Sabotage if s is not Sabotage.NONE] if self.sabotage else [Sabotage.NONE]

    @property
    def dtypes(self) -> Sequence[torch.dtype]:
        """Of the models."""
        return [torch.float64] if self.sabotage else [torch.float64, torch.float32]


def transport_here() -> str:
    """Return how the ranks of this job reach each other."""
    if mpisgd.num_nodes() > 1:
        return f"{mpisgd.num_nodes()} hosts"
    return SHARED_MEMORY if config.shared_memory() else MESSAGES


def run_here(plan: Plan, report: Callable[[Cell], None]) -> list[Cell]:
    """Return the cells of all modes; report each as soon as it is there, on every rank. Collective."""
    modes, transport = plan.modes(), transport_here()
    torch.set_num_threads(1)
    starts = not dist.is_initialized()
    if starts:
        dist.init_process_group("mpisgd")
    cells = []
    for cell in _cells(plan, modes, transport):
        report(cell)
        cells.append(cell)
    if starts:
        dist.destroy_process_group()
    return cells


def _cells(plan: Plan, modes: Sequence[Mode], transport: str) -> Iterator[Cell]:
    for mode in modes:
        for dtype in plan.dtypes:
            for sabotage in plan.sabotages:
                cell = try_mode(mode, dtype, transport, quick=plan.quick, sabotage=sabotage)
                if cell is not None:
                    yield cell
