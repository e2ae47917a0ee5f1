"""All modes on the ranks of this job: one cell after the other, and who is told of each."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

import mpisgd
from mpisgd import config
from mpisgd.tools.verification.cell import Cell, try_mode
from mpisgd.tools.verification.mode import Mode
from mpisgd.tools.verification.sabotage import Sabotage
from mpisgd.tools.verification.trial import trials_of

__all__ = ["LOSS", "MESSAGES", "SHARED_MEMORY", "SOME", "Selection", "hosts_text", "run_here"]

SOME = 3  # ranks: no power of two
SHARED_MEMORY, MESSAGES, LOSS = "shared memory", "messages", "a rank is lost"


class Selection(NamedTuple):
    """What is to be verified.

    Attributes:
        quick: fewer steps, and only modes that say most.
        sabotage: break every mode, to see that its comparison notices.
        only: modes whose family or name contains this text.
        losing: in a job that is to lose a rank, what is done to it; None in others.
        beyond: only modes that need more ranks than these.
        plain: only modes that do not load much of torch: another job has the others.
    """

    quick: bool = False
    sabotage: bool = False
    only: str = ""
    losing: Sabotage | None = None
    beyond: int = 0
    plain: bool = False

    def modes(self) -> list[Mode]:
        """Return the rows of the matrix; of a job that loses a rank only those that may be such."""
        is_quick = self.quick and not self.only
        if self.losing is None:
            from mpisgd.tools.verification.modes import all_modes, quick_modes

            modes = quick_modes() if is_quick else all_modes()
        else:
            from mpisgd.tools.verification.modes.resumption import RESUMPTION

            modes = tuple(mode for mode in RESUMPTION if mode.quick or not is_quick)
        named = [m for m in modes if self.only.lower() in f"{m.family} {m.name}".lower()]
        return [m for m in named if m.sizes[0] > self.beyond and not (self.plain and m.loads_much)]

    @property
    def sabotages(self) -> Sequence[Sabotage]:
        """What is done to each mode."""
        if self.losing is not None:
            return [self.losing]
        return [s for s in Sabotage if s is not Sabotage.NONE] if self.sabotage else [Sabotage.NONE]

    def dtypes(self, mode: Mode, transport: str) -> Sequence[torch.dtype]:
        """Return those of the models.

        If quickly, a mode that is tried in shared memory and between hosts has another one in each.
        """
        if self.sabotage or transport == LOSS or (self.quick and transport == SHARED_MEMORY):
            return mode.dtypes[:1]
        return mode.dtypes[-1:] if self.quick and mode.applies(SOME) else mode.dtypes


def hosts_text(count: int, *, pretended: bool) -> str:
    """Return the name of the way between so many hosts; pretended ones are parts of a single one."""
    return f"{count} hosts" + ", pretended" * pretended


def _transport(selection: Selection) -> str:
    """Return how the ranks of this job reach each other."""
    if selection.losing is not None:
        return LOSS
    if mpisgd.num_nodes() > 1:
        return hosts_text(mpisgd.num_nodes(), pretended=config.ranks_per_host() > 0)
    return SHARED_MEMORY if config.shared_memory() else MESSAGES


def run_here(selection: Selection, report: Callable[[Cell], None]) -> list[Cell]:
    """Return the cells of all modes; report each as soon as it is there, on every rank. Collective."""
    modes, transport = selection.modes(), _transport(selection)
    torch.set_num_threads(1)
    starts = not dist.is_initialized()
    if starts:
        dist.init_process_group("mpisgd")
    cells = []
    for cell in _cells(selection, modes, transport):
        report(cell)
        cells.append(cell)
    if starts:
        dist.destroy_process_group()
    return cells


def _cells(selection: Selection, modes: Sequence[Mode], transport: str) -> Iterator[Cell]:
    chosen = [
        (mode, dtype)
        for mode in modes
        if mode.loses_rank == (selection.losing is not None)
        for dtype in selection.dtypes(mode, transport)
    ]
    for trial in trials_of(chosen, quick=selection.quick):
        for sabotage in selection.sabotages:
            yield try_mode(trial, transport, sabotage)
