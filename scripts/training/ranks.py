"""What the training programs do with ranks beside training: files, which one of them touches, and means."""

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from torch import Tensor

import mpisgd
from training.image_data import DataError

T = TypeVar("T")


def on_rank_0(action: Callable[[], T]) -> T:
    """What `action` returns on rank 0, on every rank; where it cannot use a file, the end of the job."""
    result, problem = mpisgd.broadcast_object(attempt(action) if mpisgd.rank() == 0 else None)
    if problem:
        raise mpisgd.JobError(problem)
    return result


def everywhere(action: Callable[[], T]) -> T:
    """What `action` returns on this rank; where it cannot use a file on any rank, the end of the job."""
    result, problem = attempt(action)
    problems: list[str | None] = [None] * mpisgd.size()
    mpisgd.all_gather_object(problems, problem)
    for first in filter(None, problems):
        raise mpisgd.JobError(first)
    return result


def attempt(action: Callable[[], T]) -> tuple[T | None, str | None]:
    """What `action` returns, or what is wrong with a file."""
    try:
        return action(), None
    except (mpisgd.CheckpointError, DataError, mpisgd.JobError) as error:
        return None, str(error)
    except OSError as error:
        return None, f"cannot write {error.filename}: {error.strerror}"


@contextlib.contextmanager
def or_job_error() -> Iterator[None]:
    """End the job with one line where a checkpoint cannot be written or loaded."""
    try:
        yield
    except mpisgd.CheckpointError as error:
        raise mpisgd.JobError(str(error)) from error


def mean_over_ranks(total_and_count: Tensor) -> float:
    """The mean of all that the ranks have added up and counted; their shares may differ in size."""
    mpisgd.all_reduce(total_and_count)
    total, count = total_and_count.tolist()
    return float(total / count)
