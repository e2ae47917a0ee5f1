"""`hvd.elastic.run`: from a failed operation to an engine that runs again, on the ranks that are left.

What has failed on all ranks leaves them together, so they end the engine together and start another. A lost
rank leaves the others anywhere: each ends its own engine by itself, and mpisgd's recovery finds them together
again, in a world of those that are left (see `mpisgd.job.recovery`).
"""

import functools
from typing import Any

from mpisgd.elastic.decorator import Frontend, Function, elastic_function
from mpisgd.elastic.joining import ElasticOptions, join
from mpisgd.elastic.recovery import recover, report
from mpisgd.errors import JobError, MpisgdError, PeerLost
from mpisgd.horovod import basics, state
from mpisgd.horovod.elastic.common import State, run_fn
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.job.recovery import agree_on_end, free_old_worlds, outlives_losses, wait_for_notice
from mpisgd.threads import waiting

__all__ = ["run"]


def run(
    func: Function | None = None, *, min_ranks: int = 1, max_ranks: int | None = None, regrow: bool = False
) -> Any:
    """Make `func(state, ...)` start again when an operation fails or the ranks change.

    Before every start the state of rank 0 is broadcast. After a `HorovodInternalError` the last commit is
    restored first. If a rank was lost, the remaining ranks are renumbered, and process sets that the program
    has added are removed: a reset callback may add them again.

    Args:
        func: takes a `State` first.
        min_ranks, max_ranks, regrow: as for `mpisgd.elastic.run`; in Horovod these are options of
            `horovodrun`.

    Raises:
        HorovodInternalError: from the decorated function: the same failure came several times without a
            commit in between, or a rank was lost and this MPI is not fault tolerant.
        JobError: from the decorated function: too few ranks are left, or this is the smaller part of a
            partitioned network.
    """
    return elastic_function(FRONTEND, func, min_ranks=min_ranks, max_ranks=max_ranks, regrow=regrow)


def _start_over(options: ElasticOptions) -> None:
    """Make operations possible again. Collective over the ranks that are left.

    Args:
        options: how many ranks there may be.

    Raises:
        HorovodInternalError: a rank is lost, or does not answer, and this MPI does not outlive that.
        JobError: too few ranks are left, or this part of a cut network must not go on.
    """
    while True:
        try:
            if _is_lost():
                state.stop(PeerLost("a rank of the job was lost"))
                report(recover(str(waiting.cancel_reason()), options), "mpisgd.horovod")
            state.restart()
        except MpisgdError as exc:
            if isinstance(exc, JobError) or not _is_lost():
                raise
        else:
            free_old_worlds()
            return


def _is_lost() -> bool:
    """Return whether a rank is gone and the others can go on without it."""
    if not outlives_losses():
        return False
    wait_for_notice(lambda: state.is_initialized() and state.engine().queue.broken is not None)
    return waiting.cancelled_by_loss()


def _end_together() -> None:
    """Return when all ranks come here, where some may be lost.

    Raises:
        HorovodInternalError: a rank was lost before.
    """
    if not outlives_losses():
        return
    basics.barrier()
    try:
        agree_on_end()
    except PeerLost as exc:
        raise HorovodInternalError(str(exc)) from exc


def _join(newcomer: State) -> None:
    """Leave the world of newcomers for that of the job. Collective over newcomers and those who wait."""
    state.stop()
    join()
    state.start()
    newcomer.on_reset()


def _until_done(func: Function, state: State, options: ElasticOptions, newcomer: bool) -> Any:
    def to_the_end(state: State) -> Any:
        result = func(state)
        _end_together()
        return result

    return run_fn(to_the_end, functools.partial(_start_over, options))(state)


FRONTEND = Frontend(lambda func, state: None, _join, _until_done)
