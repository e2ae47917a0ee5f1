"""The serial number of an optimizer, by which its operations are told from those of others."""

from collections import Counter

from mpisgd.horovod.process_sets import ProcessSet

__all__ = ["serial_of_new"]

_num_made: "Counter[tuple[int, ...]]" = Counter()  # optimizers that this process has made, by their ranks


def serial_of_new(process_set: ProcessSet) -> int:
    """Return the number of a new optimizer among those of a process set, whose ranks make them in one order.

    Two optimizers may have operations under way at once, of parameters of the same names and shapes.
    """
    members = tuple(process_set.members())
    serial = _num_made[members]
    _num_made[members] += 1
    return serial
