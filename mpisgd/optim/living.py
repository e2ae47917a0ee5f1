"""The `DistributedOptimizer`s of a job, for what depends on how its ranks train."""

import weakref
from collections.abc import Iterator
from typing import Any

from mpisgd.interfaces.job import Job

__all__ = ["add_living", "living_optimizers"]

_living: "weakref.WeakSet[Any]" = weakref.WeakSet()  # of this process


def add_living(optimizer: Any) -> None:
    """Add one, until nobody has it any more."""
    _living.add(optimizer)


def living_optimizers(job: Job) -> Iterator[Any]:
    """Yield those of a job."""
    for optimizer in list(_living):
        if optimizer.synchronizer.training.group.job is job:
            yield optimizer
