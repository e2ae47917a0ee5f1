"""From a failed operation to an engine that runs again: on the same ranks, or on those that are left.

What has failed on all ranks leaves them together, so they end the engine together and start another. A lost
rank leaves the others anywhere: each ends its own engine by itself, and mpisgd's recovery finds them together
again, in a world of those that are left (see `mpisgd.elastic.recovery`).
"""

import time

from mpisgd.core import waiting
from mpisgd.elastic.joining import Terms, join
from mpisgd.elastic.recovery import free_old_worlds, recover, report
from mpisgd.errors import JobError, MpisgdError, PeerLost
from mpisgd.horovod import basics, state
from mpisgd.horovod.exceptions import HorovodInternalError
from mpisgd.job import lifecycle as jobs

__all__ = ["end_together", "join_the_others", "start_over"]

NOTICE_S = 0.5  # an error of MPI's may come before the loss has been noticed


def start_over(terms: Terms) -> None:
    """Make operations possible again. Collective over the ranks that are left.

    Args:
        terms: how many ranks there may be.

    Raises:
        HorovodInternalError: a rank is lost, or does not answer, and this MPI does not outlive that.
        JobError: too few ranks are left, or this part of a cut network must not go on.
    """
    while True:
        try:
            if _is_lost():
                state.abandon()
                report(recover(str(waiting.cancel_reason()), terms), "mpisgd.horovod")
            state.restart()
        except MpisgdError as exc:
            if isinstance(exc, JobError) or not _is_lost():
                raise
        else:
            free_old_worlds()
            return


def _is_lost() -> bool:
    """Return whether a rank is gone and the others can go on without it."""
    if not jobs.is_initialized() or jobs.current_job().failure_detector is None:
        return False
    deadline = time.monotonic() + NOTICE_S
    while state.is_broken() and waiting.cancel_reason() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return waiting.is_loss()


def join_the_others() -> None:
    """Leave the world of joiners for that of the job. Collective over joiners and survivors."""
    state.stop()
    join()
    state.start()


def end_together() -> None:
    """Return when all ranks come here: one that had left could not help the others after a loss.

    Raises:
        HorovodInternalError: a rank was lost before.
    """
    job = jobs.current_job()
    if job.failure_detector is None:
        return
    basics.barrier()
    if not job.wire.agree(True):
        text = "a rank of the job was lost at the end of elastic.run"
        raise HorovodInternalError(text) from PeerLost(text)
