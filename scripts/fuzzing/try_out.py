"""`try_out`: run a program on this rank together with the others, and say what this rank has seen."""

from __future__ import annotations

import gc

from fuzzing.compare import Outcome, observe
from fuzzing.execute import Run, execute, has_reference
from fuzzing.program import Program
from fuzzing.variants import variants

__all__ = ["try_out"]

VARIANTS_EVERY = 6  # of the programs that have a reference


def try_out(program: Program, rank: int) -> Outcome:
    """Run a program and, where that says more, its variants; compare. Collective.

    Without a reference the variants are all there is to compare with.
    """
    reference = execute(program, False, rank) if has_reference(program) else None
    run = execute(program, True)
    others: list[tuple[str, Run]] = []
    if run.failure is None and (reference is None or program.seed % VARIANTS_EVERY == 0):
        for name, variant in variants(program):
            others.append((name, execute(variant, True)))
            if others[-1][1].failure is not None:
                break
    gc.collect()  # optimizers that only a reference cycle keeps end here, on all ranks alike
    return observe(program, run, reference, others)
