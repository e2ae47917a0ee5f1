"""`run`: a training function that continues with the remaining ranks when one is lost."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

from mpisgd.core.consistency import Operation
from mpisgd.elastic.decorator import Frontend, Function, elastic_function
from mpisgd.elastic.joining import ElasticOptions, join
from mpisgd.elastic.recovery import recover, report
from mpisgd.elastic.state import State
from mpisgd.errors import InvalidArgument
from mpisgd.job import lifecycle as jobs
from mpisgd.job.recovery import agree_on_end, free_old_worlds, is_loss

__all__ = ["run"]


def run(
    func: Function | None = None, *, min_ranks: int = 1, max_ranks: int | None = None, regrow: bool = False
) -> Any:
    """Make `func(state, ...)` survive lost ranks: the others call it again, from the last commit.

    A decorator; `mpisgd.elastic` has an example. Needs a fault-tolerant MPI: `mpirun --with-ft ulfm` of Open
    MPI 5. With any other, rank 0 warns and a lost rank ends the job; `python -m mpisgd run --restarts` starts
    it again from the last checkpoint.

    Before the first call the state of rank 0 is broadcast and committed. After a loss the remaining ranks are
    renumbered in their order; the world group, fusion buffers and samplers are made again; the last commit
    that all of them had finished is restored, without gradients; reset callbacks run; and `func` is called
    again. Any other exception of `func` ends the job.

    Args:
        func: takes a `State` first. The code between `init()` and `run` also runs in processes that replace
            lost ones, as a job of their own, so collectives there have other members.
        min_ranks: with fewer left the job ends (exit code 75).
        max_ranks: how many ranks there may be with replacements; the number at the start by default.
        regrow: start a process in the place of each lost one. It runs the same program, joins at `run`, and
            gets the state from rank 0; needs a free slot. Otherwise the job continues with fewer ranks.

    Raises:
        JobError: from the wrapped function: too few ranks are left, or this is the smaller part of a
            partitioned network (of two equal parts: the one without the lowest rank).
        StateLost: a rank with a `PerRank` and its buddy are both gone.
    """
    return elastic_function(FRONTEND, func, min_ranks=min_ranks, max_ranks=max_ranks, regrow=regrow)


def _check_state(func: Function, state: Any) -> None:
    if not isinstance(state, State):
        raise InvalidArgument(
            f"elastic.run: the first argument of {func.__name__} is {type(state).__name__}; expected "
            "an mpisgd.elastic.State"
        )


def _until_done(func: Function, state: State, options: ElasticOptions, joiner: bool) -> Any:
    """Call `func` until it returns on every remaining rank."""
    _warn_without_fault_tolerance()
    prepare: Callable[[], None] = functools.partial(_resume, state, True) if joiner else state.begin
    while True:
        try:
            prepare()
            result = func(state)
            # All ranks return together: one that has left cannot take part in a recovery.
            jobs.current_job().world.queue.run(Operation("end of elastic.run"), lambda: None)
            agree_on_end()
        except Exception as exc:
            if not is_loss(exc):
                raise
            recovered = recover(str(exc), options)
            report(recovered)
            prepare = functools.partial(_resume, state, recovered.num_joiners > 0)
        else:
            return result


def _resume(state: State, joiners: bool) -> None:
    """Restore the last commit in the new world, and free the memory of the old one."""
    state.resume(joiners)
    free_old_worlds()


def _warn_without_fault_tolerance() -> None:
    job = jobs.current_job()
    if job.failure_detector is None and job.world.size > 1 and job.world.rank == 0:
        warnings.warn(
            "elastic.run: this MPI ends the job when a rank is lost; start it with `mpirun --with-ft ulfm` "
            "(Open MPI 5), or have it started again from the last checkpoint: `python -m mpisgd run "
            "--restarts 3 ...`",
            RuntimeWarning,
            stacklevel=4,
        )


FRONTEND = Frontend(_check_state, lambda state: join(), _until_done)
