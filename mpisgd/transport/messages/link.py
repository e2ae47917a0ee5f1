"""What an algorithm sees of a communicator: exchanges of contiguous memory with a timeout."""

from collections.abc import Iterable

import torch
from torch import Tensor

from mpisgd.errors import CollectiveTimeout
from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.threads.waiting import Backoff

__all__ = ["Link", "Parts", "Transfer", "even_ranges", "frames"]

Parts = list[tuple[int, Tensor]]  # what goes to or comes from which rank

TAG = 64  # above the consistency check's; the queue runs one operation at a time, so one tag is enough
# Below Open MPI's limit for sending at once (64 KiB over TCP). Larger messages that cross each other take
# turns on the link there: pieces of 128 KiB took 1.2 to 1.5 times the link's time, of 1 MiB 1.7 times, these
# 1.05 times.
FRAME_BYTES = 60 * 2**10


class Link:
    """The queue's communicator during one operation.

    Attributes:
        rank: this rank in the group.
        size: number of ranks.
    """

    def __init__(self, communicator: GroupCommunicator, name: str, timeout_s: float) -> None:
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

    def transfer(self, sends: Parts | None = None, receives: Parts | None = None) -> None:
        """Do several sends and receives at once; empty tensors are not sent.

        Raises:
            CollectiveTimeout: a partner stopped in the middle of the operation.
        """
        self.start(sends or [], receives or []).wait()

    def start(self, sends: Parts, receives: Parts) -> "Transfer":
        """Begin several sends and receives; empty tensors are not sent.

        Both sides begin what goes between two ranks in the same order.
        """
        sends, receives = _without_empty(sends), _without_empty(receives)
        requests: list[Request] = [self._communicator.irecv(tensor, src, TAG) for src, tensor in receives]
        requests += [self._communicator.isend(tensor, dst, TAG) for dst, tensor in sends]
        return Transfer(self, requests, [*sends, *receives])

    def wait(self, requests: list[Request], parts: Parts) -> None:
        """Wait for what was begun."""
        backoff = Backoff(self._timeout_s)
        in_time = False
        try:
            in_time = backoff.wait_for(lambda: self._communicator.poll(requests))
        finally:  # a lost rank ends the wait, too
            if not in_time:
                self.abandon(requests, parts)
        if not in_time:
            names, seen = self._communicator.global_ranks, f": {backoff.missing}" if backoff.missing else ""
            partners = sorted({names[rank] for rank, _ in parts})
            raise CollectiveTimeout(
                f"{self._name}: rank {names[self.rank]} has waited {backoff.waited_s:.1f} s in the middle "
                f"of the operation for one of the ranks {partners}{seen}"
            )

    def abandon(self, requests: list[Request], parts: Parts) -> None:
        """Leave what was begun alone; MPI may still write to its memory, which is kept."""
        self._communicator.abandon(requests, parts)


class Transfer:
    """Sends and receives that are under way. Their memory is kept until they are over, or for good."""

    def __init__(self, link: Link, requests: list[Request], parts: Parts) -> None:
        self._link = link
        self._requests = requests
        self._parts = parts

    def wait(self) -> None:
        """Return when all of it is over.

        Raises:
            CollectiveTimeout: a partner stopped in the middle of the operation.
        """
        requests, self._requests = self._requests, []
        self._link.wait(requests, self._parts)

    def abandon(self) -> None:
        """Leave alone what is not over; something else has failed."""
        if self._requests:
            self._link.abandon(self._requests, self._parts)


def _without_empty(transfers: Parts) -> Parts:
    return [(rank, tensor) for rank, tensor in transfers if tensor.numel()]


def even_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """Return `parts` consecutive (start, stop) that cover range(total); sizes differ by at most one."""
    return [(total * i // parts, total * (i + 1) // parts) for i in range(parts)]


def frames(tensor: Tensor) -> Iterable[Tensor]:
    """Cut a tensor [n] into messages of at most FRAME_BYTES."""
    if tensor.nbytes <= FRAME_BYTES:
        return (tensor,) if tensor.numel() else ()
    return torch.split(tensor, FRAME_BYTES // tensor.element_size())
