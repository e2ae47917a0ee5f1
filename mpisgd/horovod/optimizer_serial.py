"""The serial number of an optimizer, by which its operations are told from those of others."""

from collections import Counter

from mpisgd.horovod.process_sets import ProcessSet
from mpisgd.job.job_of_thread import job_place

__all__ = ["serial_of_new"]


class _NumMade(Counter[tuple[int, ...]]):
    """How many optimizers a rank has made, by the ranks of their process set."""


def serial_of_new(process_set: ProcessSet) -> int:
    """Return the number of a new optimizer among those of a process set, whose ranks make them in one order.

    Two optimizers may have operations under way at once, of parameters of the same names and shapes.
    """
    num_made, members = job_place().own(_NumMade), tuple(process_set.members())
    serial = num_made[members]
    num_made[members] += 1
    return serial
