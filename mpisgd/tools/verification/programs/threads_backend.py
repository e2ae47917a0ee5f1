"""`ThreadsBackend`: programs on ranks that are threads of this process, in an order that a seed decides."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from typing import Any

import torch

import mpisgd
from mpisgd.job.lazy_dynamo import defer_import
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks
from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.program import Program
from mpisgd.tools.verification.programs.surviving import Survived, survive
from mpisgd.tools.verification.programs.try_losses import conclude_after_losses, differing, hosts_of
from mpisgd.tools.verification.programs.try_out import conclude, references_or_none, see
from mpisgd.tools.verification.sabotage import Sabotage

__all__ = ["ThreadsBackend"]

OPERATION_LIMIT_S = 60.0  # simulated
PROGRAM_LIMIT_S = 120.0  # real: the machine may have other things to do
COLLECT_EVERY = 20  # programs
ANOTHER_ORDER_EVERY = 3  # of those with losses


class ThreadsBackend:
    """Runs each program in a job of its own; the seed of the program is that of the schedule, too."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        defer_import()  # as `mpisgd.init` does; those of the references are made before there are ranks
        self._runs = 0

    def run(self, program: Program, sabotage: Sabotage = Sabotage.NONE) -> Verdict:
        """Run a program on its ranks, broken on purpose or not, and return what became of it."""
        # What a job tells its user, such as the spectral gap of a graph, tells whoever verifies nothing.
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if self._runs == 1 or self._runs % COLLECT_EVERY == 0:  # the first one loads most modules
                gc.collect()  # which may warn of what ranks that were lost have left
                gc.freeze()  # each new optimizer collects what others have left, and goes through all modules
            self._runs += 1
            try:
                return self._with_losses(program) if program.loses else self._without(program, sabotage)
            except RankFailed as exc:
                return Verdict(f"crash {type(exc.__cause__).__name__}", str(exc))
            except TimeoutError as exc:
                return Verdict("hang", str(exc))

    def _without(self, program: Program, sabotage: Sabotage) -> Verdict:
        references = references_or_none(program)
        return conclude(program, _run(program, lambda: see(program, references[mpisgd.rank()], sabotage)))

    def _with_losses(self, program: Program) -> Verdict:
        outcomes, seen = _survivors(program, program.seed)
        verdict = conclude_after_losses(program, outcomes, seen)
        if verdict.is_fault or program.seed % ANOTHER_ORDER_EVERY:
            return verdict
        outcomes, others = _survivors(program, program.seed + 1)
        again = conclude_after_losses(program, outcomes, others)
        if again.is_fault:
            return again
        text = differing(seen, others) if verdict.kind == again.kind == "ok" else ""
        return Verdict("variant", text) if text else verdict


def _survivors(program: Program, seed: int) -> tuple[list[Any], dict[int, Survived]]:
    """Return the results of the ranks, and what those have seen that have come to their end."""
    seen: dict[int, Survived] = {}

    def body() -> None:
        me = mpisgd.rank()  # as numbered at the beginning
        seen[me] = survive(program)

    return _run(program, body, seed=seed, losses=()), seen


def _run(
    program: Program, body: Callable[[], Any], *, seed: int | None = None, losses: tuple[()] | None = None
) -> list[Any]:
    return run_ranks(
        program.ranks,
        body,
        seed=program.seed if seed is None else seed,
        ranks_per_host=tuple(map(len, hosts_of(program))),
        timeout_s=OPERATION_LIMIT_S,
        limit_s=PROGRAM_LIMIT_S,
        losses=losses,
    )
