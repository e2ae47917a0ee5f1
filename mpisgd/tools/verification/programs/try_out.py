"""`try_out`: run a program on this rank together with the others, and say what became of it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

from mpisgd.tools.verification.programs.compare import Outcome, Verdict, judge, observe
from mpisgd.tools.verification.programs.contract import may_be_refused
from mpisgd.tools.verification.programs.execute import Run, execute, has_reference, references_of
from mpisgd.tools.verification.programs.program import Program
from mpisgd.tools.verification.programs.variants import all_at_once, ranks_agree
from mpisgd.tools.verification.sabotage import Sabotage

__all__ = ["conclude", "references_or_none", "see", "try_out"]

VARIANTS_EVERY = 6  # of the programs that have a reference


def try_out(program: Program, rank: int, all_gather: Callable[[Outcome], list[Outcome]]) -> Verdict:
    """Run a program, and return its outcome, the same on all ranks. Collective.

    Args:
        program: which is run.
        rank: this one.
        all_gather: brings what each rank has seen to all; it must not depend on what is being tested.
    """
    references = references_or_none(program)
    outcome = see(program, references[rank])
    gc.collect()  # optimizers that only a reference cycle keeps end here, on all ranks alike
    return conclude(program, all_gather(outcome))


def references_or_none(program: Program) -> Sequence[Run | None]:
    """Return the results of one process for each rank, Nones where there is nothing to compare with."""
    return references_of(program) if has_reference(program) else [None] * program.ranks


def conclude(program: Program, outcomes: Sequence[Outcome]) -> Verdict:
    """Return the outcome of a program, from what each of its ranks has seen."""
    return judge(outcomes, ranks_agree=ranks_agree(program), may_be_refused=may_be_refused(program))


def see(program: Program, reference: Run | None, sabotage: Sabotage = Sabotage.NONE) -> Outcome:
    """Run a program and, where that says more, once more in other words; return what this rank has seen.

    Collective. Without a reference this is all there is to compare with.
    """
    run = execute(program, sabotage)
    others: list[tuple[str, Run]] = []
    says_more = reference is None or program.seed % VARIANTS_EVERY == 0
    if run.failure is None and program.events and says_more and sabotage is Sabotage.NONE:
        name, variant = all_at_once(program)
        others.append((name, execute(variant)))
    return observe(program, run, reference, others)
