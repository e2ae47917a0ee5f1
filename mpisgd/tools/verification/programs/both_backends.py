"""`BothBackends`: programs on ranks that are threads, and again by mpirun; the same bits are expected."""

from __future__ import annotations

from mpisgd.tools.verification.programs.compare import Verdict
from mpisgd.tools.verification.programs.mpirun_backend import MpirunBackend
from mpisgd.tools.verification.programs.program import Program
from mpisgd.tools.verification.programs.threads_backend import ThreadsBackend

__all__ = ["BothBackends", "compared"]


class BothBackends:
    """Runs each program on threads and by mpirun, and compares what came out.

    Args:
        mpirun: opened and closed by the caller.
    """

    def __init__(self, mpirun: MpirunBackend) -> None:
        self._threads, self._mpirun = ThreadsBackend(), mpirun

    def run(self, program: Program) -> Verdict:
        """Run a program twice; return what became of it, "backends" where that is not the same.

        Ranks are lost on threads alone.
        """
        if program.loses:
            return self._threads.run(program)
        return compared(self._threads.run(program), self._mpirun.run(program))


def compared(threads: Verdict, mpirun: Verdict) -> Verdict:
    """Return the outcome of a program from its outcomes on each backend."""
    if threads.kind != mpirun.kind:
        text = f"threads: {threads.kind}: {threads.text}\nmpirun: {mpirun.kind}: {mpirun.text}"
        return Verdict("backends", text, mpirun.is_healthy)
    for rank, (on_threads, by_mpirun) in enumerate(zip(threads.bits, mpirun.bits, strict=True)):
        for (event, one), (_, other) in zip(on_threads[0], by_mpirun[0], strict=True):
            if one != other:
                return Verdict("backends", f"rank {rank}: other bits after event {event}")
        if on_threads[1] != by_mpirun[1]:
            return Verdict("backends", f"rank {rank}: other bits in the states at the end")
    return mpirun
