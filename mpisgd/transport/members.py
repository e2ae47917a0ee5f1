"""`Members`: the ranks of a group, as a transport between them is opened."""

from collections.abc import Callable
from typing import NamedTuple

from mpisgd.core.topology import Topology
from mpisgd.interfaces.communicator import GroupCommunicator

__all__ = ["Members"]


class Members(NamedTuple):
    """What a transport is made of.

    Attributes:
        communicator: the queue's communicator of the group.
        topology: which of its ranks share a host.
        best_num_leaders: tells how many ranks of each host should exchange messages with the others, from the
            bytes of the message and whether it is of 16-bit floats; the same on all ranks.
        name: of the group, for messages.
        timeout_s: how long to wait for the other ranks in the middle of an operation.
    """

    communicator: GroupCommunicator
    topology: Topology
    best_num_leaders: Callable[[int, bool], int]
    name: str
    timeout_s: float
