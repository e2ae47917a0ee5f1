"""Where the job is that `current_job()` returns: one place for the process, or one for each rank.

Under MPI a process is a rank, and all of its threads belong to the same job. Where the ranks are threads of
one process each has a place of its own, which the threads that it starts share with it: they see it when the
rank leaves its job and enters another one.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mpisgd.job.world import Job

__all__ = ["PROCESS", "JobPlace", "job_of_this_thread", "job_place"]

T = TypeVar("T")


@dataclass(eq=False)
class JobPlace:
    """Where the job of a rank is.

    Attributes:
        job: the one that runs, None before and after.
        ended: the last one, after `shutdown()`.
        kept: what modules above the job keep for this rank, whichever job it is in; by its type.
    """

    job: Job | None = None
    ended: Job | None = None
    kept: dict[type, Any] = field(default_factory=dict)

    def own(self, kind: type[T]) -> T:
        """Return the job's object of a type; the first call makes it."""
        if kind not in self.kept:
            self.kept[kind] = kind()
        found: T = self.kept[kind]
        return found


PROCESS = JobPlace()  # of the threads that belong to no rank in particular
_place: ContextVar[JobPlace] = ContextVar("mpisgd_job", default=PROCESS)

job_place = _place.get  # of this thread


@contextlib.contextmanager
def job_of_this_thread(job: Job) -> Iterator[JobPlace]:
    """Let this thread, and the threads of mpisgd that are started inside, be a rank of `job`.

    `current_job()`, `shutdown()` and everything else that asks for the job find this one; `init()` finds it
    initialized. Other threads do not notice. The job is not ended here: call `shutdown()` inside.
    """
    place = JobPlace(job)
    token = _place.set(place)
    try:
        yield place
    finally:
        _place.reset(token)
