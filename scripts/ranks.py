"""What the training programs do with ranks beside training: files, which one of them touches, and means."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

from image_data import DataError
from torch import Tensor

import mpisgd

__all__ = ["mean_over_ranks", "on_rank_0", "or_job_error"]

T = TypeVar("T")


def on_rank_0(action: Callable[[], T]) -> T:
    """What `action` returns on rank 0, on every rank; where it cannot use a file, the end of the job."""
    result, problem = None, None
    if mpisgd.rank() == 0:
        try:
            result = action()
        except (mpisgd.CheckpointError, DataError, mpisgd.JobError) as error:
            problem = str(error)
        except OSError as error:
            problem = f"cannot write {error.filename}: {error.strerror}"
    result, problem = mpisgd.broadcast_object((result, problem))
    if problem:
        raise mpisgd.JobError(problem)
    return result


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
