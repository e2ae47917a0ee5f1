"""`run`: a training function that goes on with the ranks that are left when one is lost."""

import functools
import time
import warnings
from collections.abc import Callable
from typing import Any

from mpisgd.core import waiting
from mpisgd.core.consistency import Operation
from mpisgd.elastic.recovery import free_what_is_over, recover, tell
from mpisgd.elastic.regrow import Terms, join
from mpisgd.elastic.state import State
from mpisgd.elastic.survivor import Face, Function, surviving
from mpisgd.errors import InvalidArgument, JobError, PeerLost
from mpisgd.job import lifecycle as jobs

__all__ = ["run"]

NOTICE_S = 0.5  # the failure detector needs less; an error may come before it has looked


def run(
    func: Function | None = None,
    *,
    min_ranks: int = 1,
    max_ranks: int | None = None,
    regrow: bool = False,
) -> Any:
    """Let `func(state, ...)` survive the loss of ranks: the others call it again, from the last commit on.

        @mpisgd.elastic.run
        def train(state):
            while state.epoch < 10:
                ...
                state.epoch += 1
                state.commit()

        train(state)

    Needs an MPI that outlives lost ranks: `mpirun --with-ft ulfm` of Open MPI 5. Elsewhere a lost rank ends
    the job, which `python -m mpisgd run --restarts` starts again from the last checkpoint; rank 0 warns.

    Before the first call the state is that of rank 0 on all ranks, and committed. After a loss those that are
    left are numbered anew, in their order; groups of all ranks, fusion buffers and samplers are made anew,
    the state is that of the last commit which all of them had finished, reset callbacks run, and `func` is
    called again. Whatever else it raises ends the job.

    Args:
        func: takes a `State` first. Collectives belong in it, or before: what runs between `init()` and `run`
            also runs in processes that are started in the place of lost ones, as a job of their own.
        min_ranks: with fewer left the job ends (exit code 75).
        max_ranks: how many there may be when lost ones are replaced; as many as at first by default.
        regrow: start a process in the place of each lost one. It runs the same program, joins at `run`, and
            gets the state from rank 0; needs a free slot. Otherwise the job goes on with fewer.

    Raises:
        JobError: from the function made: too few ranks are left, or this part of a cut network must not go
            on (the majority does; of two halves the one with the lowest rank).
        StateLost: what only lost ranks had is gone.
    """
    return surviving(FACE, func, min_ranks=min_ranks, max_ranks=max_ranks, regrow=regrow)


def _check_state(func: Function, state: Any) -> None:
    if not isinstance(state, State):
        raise InvalidArgument(
            f"elastic.run: the first argument of {func.__name__} is {type(state).__name__}; expected "
            "an mpisgd.elastic.State"
        )


def _until_done(func: Function, state: State, terms: Terms, newcomer: bool) -> Any:
    """Call until it returns on every rank that is left."""
    _warn_where_none_survives()
    prepare: Callable[[], None] = functools.partial(_resume, state, True) if newcomer else state.begin
    while True:
        try:
            prepare()
            result = func(state)
            _end_together()
        except Exception as exc:
            if not _is_a_loss(exc):
                raise
            lost = recover(str(exc), terms)
            tell(lost)
            prepare = functools.partial(_resume, state, lost.newcomers > 0)
        else:
            return result


def _resume(state: State, newcomers: bool) -> None:
    """Put back the last commit in the new world, and give back the memory of the old one."""
    state.resume(newcomers)
    free_what_is_over()


def _end_together() -> None:
    """Leave when all ranks do: one that had left could not come to the others' help any more."""
    job = jobs.current_job()
    job.world.queue.run(Operation("end of elastic.run"), lambda: None)
    if job.failure_detector is not None and not job.wire.agree(True):
        raise PeerLost("a rank of the job was lost at the end of elastic.run")


def _is_a_loss(exc: Exception) -> bool:
    """Return whether this error comes of a lost rank, whatever it became on its way through torch.

    A rank that is late is not lost. To go on without it is impossible, as it may come at any time, and to go
    back to the last commit together with it would only wait for it again: so the job ends.
    """
    if isinstance(exc, JobError) or not jobs.is_initialized() or jobs.current_job().failure_detector is None:
        return False
    deadline = time.monotonic() + NOTICE_S
    while not isinstance(exc, PeerLost) and waiting.cancel_reason() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return waiting.is_loss() or (isinstance(exc, PeerLost) and waiting.cancel_reason() is None)


def _warn_where_none_survives() -> None:
    job = jobs.current_job()
    if job.failure_detector is None and job.world.size > 1 and job.world.rank == 0:
        warnings.warn(
            "elastic.run: this MPI ends the job when a rank is lost; start it with `mpirun --with-ft ulfm` "
            "(Open MPI 5), or have it started again from the last checkpoint: `python -m mpisgd run "
            "--restarts 3 ...`",
            RuntimeWarning,
            stacklevel=4,
        )


FACE = Face(_check_state, lambda state: join(), _until_done)
