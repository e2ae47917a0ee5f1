"""`Leader`: a rank that exchanges messages for its host with those of the same local rank on the others."""

from collections.abc import Callable, Sequence

from torch import Tensor

from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.transport.messages.link import frames

__all__ = ["Leader"]


class Leader:
    """This rank and its counterparts.

    Args:
        communicator: the queue's communicator.
        ranks: one of `communicator`'s ranks per host, this one among them.
        host: which of them this one is.

    Attributes:
        others: every other host's number and rank; each leader begins with another one.
    """

    def __init__(self, communicator: GroupCommunicator, ranks: Sequence[int], host: int) -> None:
        self.communicator = communicator
        self.ranks = ranks
        self.host = host
        order = [*range(host + 1, len(ranks)), *range(host)]
        self.others = [(other, ranks[other]) for other in order]

    def start(
        self, tag: int, sends: Callable[[int], Tensor], receives: Callable[[int], Tensor]
    ) -> list[Request]:
        """Start a message to and from every other host; both functions tell the memory for a host."""
        requests = [
            self.communicator.irecv(f, rank, tag) for h, rank in self.others for f in frames(receives(h))
        ]
        requests += [
            self.communicator.isend(f, rank, tag) for h, rank in self.others for f in frames(sends(h))
        ]
        return requests

    def send(self, tag: int, host: int, part: Tensor) -> list[Request]:
        """Start a message [n] to another host."""
        return [self.communicator.isend(part, self.ranks[host], tag)]

    def receive(self, tag: int, host: int, part: Tensor) -> list[Request]:
        """Start to receive a message, of [n] at most, from another host."""
        return [self.communicator.irecv(part, self.ranks[host], tag)]

    def exchange(self, tag: int, host: int, mine: Tensor, theirs: Tensor) -> list[Request]:
        """Start to exchange a part for another host's, in messages that do not take turns."""
        rank = self.ranks[host]
        requests = [self.communicator.irecv(frame, rank, tag) for frame in frames(theirs)]
        return requests + [self.communicator.isend(frame, rank, tag) for frame in frames(mine)]
