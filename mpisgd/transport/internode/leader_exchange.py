"""`LeaderExchange`: what the first ranks of all hosts tell each other at the beginning of every operation.

Each sends every other one message: the smallest and the largest digest of its host's ranks, and, where the
operation is on a small tensor, what these ranks have added up to. So a small all-reduce between hosts takes
one message, its check included.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpisgd.transport.internode.host_messages import HEADER_BYTES, HostMessages
from mpisgd.transport.internode.leader import Leader

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MAX_HOSTS", "LeaderExchange"]

MAX_HOSTS = 64  # beyond this a logarithmic number of rounds is quicker than a message to everyone
TAG = 48


class LeaderExchange:
    """The spread among the hosts' first ranks. Cost: one message to every other host, all at once.

    Args:
        speaker: this rank, the first of its host.
        board: where the messages lie.

    Attributes:
        offer: writes what this host gives into its place on the board and returns the bytes of it; asked once
            when the next exchange starts.
    """

    def __init__(self, speaker: Leader, board: HostMessages) -> None:
        self._speaker = speaker
        self._board = board
        self.offer: Callable[[], int] | None = None
        self._requests: list[MPI.Request] = []

    def start(self, low: int, high: int) -> None:
        """Begin with the extremes of this host."""
        host, messages = self._speaker.host, self._board.messages
        self._board.write(host, low, high)
        nbytes = HEADER_BYTES
        if self.offer is not None:
            nbytes += self.offer()
            self.offer = None
        mine = messages[host][:nbytes]
        self._requests = self._speaker.start(TAG, lambda _: mine, messages.__getitem__)

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        return self._speaker.wire.poll(self._requests)

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        return self._board.extremes()

    def missing(self) -> str:
        """Say for whom this rank waits."""
        ranks = [self._speaker.wire.global_ranks[rank] for _, rank in self._speaker.others]
        return f"one of the ranks {ranks} of other hosts, which has not come or waits for another one itself"
