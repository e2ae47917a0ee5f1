"""A training whose ranks start equal and then combine nothing: nobody has wrapped the optimizer.

Each rank then trains a model of its own, nothing fails, and the exit code is 0. The first rank warns of it.
"""

from dataclasses import dataclass

import torch.distributed as dist

from mpisgd.core.group import Group
from mpisgd.job.job_of_thread import job_place
from mpisgd.monitor.step_counter import counter
from mpisgd.standard_error import print_to_user

__all__ = ["watch_for_operations"]


def watch_for_operations(group: Group) -> None:
    """Look at the end of the job whether operations have followed the broadcast that ends now."""
    job = job_place().job
    if job is not None and group is job.world and group.rank == 0 < group.size - 1:
        job.before_end[:] = [each for each in job.before_end if not isinstance(each, _LastBroadcast)]
        job.before_end.append(_LastBroadcast(group.queue.consistency.number, counter.words[0]))


@dataclass(frozen=True)
class _LastBroadcast:
    """Tells the user, when the job ends.

    Attributes:
        number: of the last operation of the latest broadcast.
        steps: how many steps the optimizer had made by then that made the last one.
    """

    number: int
    steps: int

    def __call__(self) -> None:
        """Look whether there were steps and no operations."""
        job, taken = job_place().job, counter.words[0] - self.steps
        if job is None or job.groups != [job.world] or taken <= 0:
            return
        if dist.is_available() and dist.is_initialized():  # what torch combines by another backend
            return
        if job.world.queue.consistency.number == self.number:
            print_to_user(
                f"warning: {taken} steps were taken after broadcast_parameters, and no operation of mpisgd: "
                "each rank has trained a model of its own. Wrap the optimizer in mpisgd.DistributedOptimizer"
            )
