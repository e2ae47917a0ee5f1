"""`ThreadsBackend`: programs on ranks that are threads of this process, in an order that a seed decides."""

from __future__ import annotations

import gc
import warnings

import torch

import mpisgd
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks
from mpisgd.verification.programs.compare import Verdict
from mpisgd.verification.programs.program import Program
from mpisgd.verification.programs.try_out import conclude, reference_of, see

__all__ = ["ThreadsBackend"]

OPERATION_LIMIT_S = 60.0  # simulated
PROGRAM_LIMIT_S = 120.0  # real: the machine may have other things to do
COLLECT_EVERY = 20  # programs


class ThreadsBackend:
    """Runs each program in a job of its own; the seed of the program is that of the schedule, too."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        gc.freeze()  # a second optimizer collects what the first one has left behind, and that is all modules
        self._runs = 0

    def run(self, program: Program) -> Verdict:
        """Run a program on its ranks and return what became of it."""
        self._runs += 1
        if self._runs % COLLECT_EVERY == 0:
            gc.collect()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            references = [reference_of(program, rank) for rank in range(program.ranks)]
            try:
                outcomes = run_ranks(
                    program.ranks,
                    lambda: see(program, references[mpisgd.rank()]),
                    seed=program.seed,
                    ranks_per_host=_division(program),
                    timeout_s=OPERATION_LIMIT_S,
                    limit_s=PROGRAM_LIMIT_S,
                )
            except RankFailed as exc:
                return Verdict(f"crash {type(exc.__cause__).__name__}", str(exc))
            except TimeoutError as exc:
                return Verdict("hang", str(exc))
        return conclude(program, outcomes)


def _division(program: Program) -> tuple[int, ...]:
    """Return how many ranks each host has; () if there is one."""
    ranks, each = program.ranks, program.ranks_per_host
    return tuple(min(each, ranks - first) for first in range(0, ranks, each)) if each else ()
