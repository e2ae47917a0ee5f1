"""What an algorithm sees of a communicator: exchanges of contiguous memory with a timeout."""

from typing import TYPE_CHECKING

from torch import Tensor

from mpisgd.core.waiting import Backoff
from mpisgd.errors import CollectiveTimeout

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.transport.mpi import Communicator

__all__ = ["Link", "even_ranges"]

TAG = 64  # above the consistency check's; the queue runs one operation at a time, so one tag is enough


class Link:
    """The queue's communicator during one operation.

    Attributes:
        rank: this rank in the group.
        size: number of ranks.
    """

    def __init__(self, communicator: "Communicator", name: str, timeout_s: float) -> None:
        self.rank = communicator.rank
        self.size = communicator.size
        self._communicator = communicator
        self._name = name
        self._timeout_s = timeout_s

    def send(self, tensor: Tensor, dst: int) -> None:
        """Send `tensor` to `dst` and return when it may be changed again."""
        self.transfer(sends=[(dst, tensor)])

    def recv(self, tensor: Tensor, src: int) -> None:
        """Receive `tensor` from `src`."""
        self.transfer(receives=[(src, tensor)])

    def exchange(self, mine: Tensor, dst: int, theirs: Tensor, src: int) -> None:
        """Send `mine` to `dst` while `theirs` comes from `src`."""
        self.transfer(sends=[(dst, mine)], receives=[(src, theirs)])

    def transfer(
        self, sends: list[tuple[int, Tensor]] | None = None, receives: list[tuple[int, Tensor]] | None = None
    ) -> None:
        """Do several sends and receives at once; empty tensors are not sent.

        Raises:
            CollectiveTimeout: a partner stopped in the middle of the operation.
        """
        sends, receives = _without_empty(sends or []), _without_empty(receives or [])
        requests: list[MPI.Request] = [self._communicator.irecv(tensor, src, TAG) for src, tensor in receives]
        requests += [self._communicator.isend(tensor, dst, TAG) for dst, tensor in sends]
        backoff = Backoff(self._timeout_s)
        in_time = False
        try:
            in_time = backoff.wait_for(lambda: self._communicator.poll(requests))
        finally:  # a lost rank ends the wait, too
            if not in_time:
                self._communicator.abandon(requests, (sends, receives))
        if not in_time:
            names, seen = self._communicator.global_ranks, f": {backoff.missing}" if backoff.missing else ""
            partners = sorted({names[rank] for rank, _ in sends + receives})
            raise CollectiveTimeout(
                f"{self._name}: rank {names[self.rank]} has waited {backoff.waited_s:.1f} s in the middle "
                f"of the operation for one of the ranks {partners}{seen}"
            )


def _without_empty(transfers: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
    return [(rank, tensor) for rank, tensor in transfers if tensor.numel()]


def even_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """Return `parts` consecutive (start, stop) that cover range(total); sizes differ by at most one."""
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]
