"""`run`: a training function that goes on with the ranks that are left when one is lost."""

import functools
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

from mpisgd.comm import job as jobs
from mpisgd.comm import waiting
from mpisgd.comm.arguments import check_callable, check_flag, check_positive, shown
from mpisgd.comm.handshake import Operation
from mpisgd.elastic.recovery import Recovered, recover
from mpisgd.elastic.regrow import Terms, is_newcomer, join
from mpisgd.elastic.state import State
from mpisgd.errors import InvalidArgument, JobError, PeerLost

__all__ = ["run"]

Function = Callable[..., Any]

NOTICE_S = 0.5  # the sentinel needs less; an error may come before it has looked


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
    if func is None:
        return functools.partial(run, min_ranks=min_ranks, max_ranks=max_ranks, regrow=regrow)
    _check(func, min_ranks, max_ranks, regrow)

    @functools.wraps(func)
    def survivor(state: State, *args: Any, **options: Any) -> Any:
        if not isinstance(state, State):
            raise InvalidArgument(
                f"elastic.run: the first argument of {func.__name__} is {type(state).__name__}; expected "
                "an mpisgd.elastic.State"
            )
        newcomer = is_newcomer()
        if newcomer:
            join()
        size = jobs.size()
        terms = Terms(min_ranks, size if max_ranks is None else min(size, max_ranks), regrow)
        _warn_where_none_survives()
        return _until_done(lambda: func(state, *args, **options), state, terms, newcomer)

    return survivor


def _check(func: Any, min_ranks: Any, max_ranks: Any, regrow: Any) -> None:
    check_callable("elastic.run", "func", func)
    check_positive("elastic.run", "min_ranks", min_ranks, whole=True)
    check_flag("elastic.run", "regrow", regrow)
    if max_ranks is not None and (not isinstance(max_ranks, int) or max_ranks < min_ranks):
        raise InvalidArgument(
            f"elastic.run: max_ranks={shown(max_ranks)}; expected {min_ranks} (min_ranks) or more"
        )


def _until_done(call: Callable[[], Any], state: State, terms: Terms, newcomer: bool) -> Any:
    """Call until it returns on every rank that is left."""
    prepare: Callable[[], None] = functools.partial(state.resume, True) if newcomer else state.begin
    while True:
        try:
            prepare()
            result = call()
            _end_together()
        except Exception as exc:
            if not _is_a_loss(exc):
                raise
            lost = recover(str(exc), terms)
            _tell(lost)
            prepare = functools.partial(state.resume, lost.newcomers > 0)
        else:
            return result


def _end_together() -> None:
    """Leave when all ranks do: one that had left could not come to the others' help any more."""
    job = jobs.current_job()
    job.world.lane.run(Operation("end of elastic.run"), lambda: None)
    if job.sentinel is not None and not job.wire.agree(True):
        raise PeerLost("a rank of the job was lost at the end of elastic.run")


def _is_a_loss(exc: Exception) -> bool:
    """Return whether this error comes of a lost rank, whatever it became on its way through torch.

    A rank that is late is not lost. To go on without it is impossible, as it may come at any time, and to go
    back to the last commit together with it would only wait for it again: so the job ends.
    """
    if isinstance(exc, JobError) or not jobs.is_initialized() or jobs.current_job().sentinel is None:
        return False
    deadline = time.monotonic() + NOTICE_S
    while not isinstance(exc, PeerLost) and waiting.vain() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return waiting.is_loss() or (isinstance(exc, PeerLost) and waiting.vain() is None)


def _tell(recovered: Recovered) -> None:
    if jobs.rank() == 0:
        lost = recovered.lost
        who = f"rank {lost[0]} is" if len(lost) == 1 else f"ranks {', '.join(map(str, lost))} are"
        joined = f", {recovered.newcomers} of them new" if recovered.newcomers else ""
        print(
            f"mpisgd: elastic: {who} lost; {jobs.size()} ranks go on from the last commit{joined} (recovered "
            f"in {recovered.took_s:.2f} s)",
            file=sys.stderr,
            flush=True,
        )


def _warn_where_none_survives() -> None:
    job = jobs.current_job()
    if job.sentinel is None and job.world.size > 1 and job.world.rank == 0:
        warnings.warn(
            "elastic.run: this MPI ends the job when a rank is lost; start it with `mpirun --with-ft ulfm` "
            "(Open MPI 5), or have it started again from the last checkpoint: `python -m mpisgd run "
            "--restarts 3 ...`",
            RuntimeWarning,
            stacklevel=3,
        )
