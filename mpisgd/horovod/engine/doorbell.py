"""`Doorbell`: a rank that has nothing to do sleeps until another wants it, or one of its own threads does.

On one host a word of shared memory is slept on. Between hosts a message of one integer wakes the first rank
of a host, which asks for it every few milliseconds while it sleeps, and wakes the others.
"""

import contextlib
import os
import time
from typing import TYPE_CHECKING, Any

import torch

from mpisgd.errors import MpisgdError
from mpisgd.transport.ipc.futex import Futex
from mpisgd.transport.ipc.segment import PAGE, Segment, open_segment

if TYPE_CHECKING:
    from mpisgd.core.topology import Topology
    from mpisgd.transport.mpi import Communicator

__all__ = ["Doorbell"]

# Words of a rank: one that changes whenever it is wanted, and the newest cycle that others wait for it in.
CHANGE, CYCLE, LINE = 0, 8, 8
# How late a message from another host is noticed: at first, and by how much later it may be as nothing comes,
# which is a hundredth of the time that has passed.
NAP_S, LONGEST_NAP_S, SLACK = 0.002, 0.02, 1.01


class Doorbell:
    """The bells of all ranks of a job. One thread of a rank waits, any may ring.

    Args:
        wire: a communicator of its own over all ranks.
        local: over the ranks of this host.
        topology: of `wire`.
    """

    def __init__(self, wire: "Communicator", local: "Communicator", topology: "Topology") -> None:
        self._wire = wire
        self._mine = topology.local_rank
        segment = open_segment(local, PAGE)
        self._segment: Segment = segment if segment is not None else _private_segment(local.size)
        self._alone = segment is None  # then everyone is woken by messages
        self._words = memoryview(self._segment.memory).cast("Q")
        self._futex = Futex(self._segment)
        self._stride = self._segment.share_bytes // 8
        self._locals = [] if self._alone else [i for i in range(local.size) if i != self._mine]
        self._peers = self._who_gets_messages(topology)
        self._listens = self._alone or (bool(self._peers) and self._mine == 0)
        self._nap_s = NAP_S
        self._request: Any = None
        self._inbox = torch.zeros(1, dtype=torch.int64)
        self._sent: list[tuple[Any, torch.Tensor]] = []

    def _who_gets_messages(self, topology: "Topology") -> list[int]:
        if self._alone:
            return [rank for rank in range(topology.size) if rank != topology.rank]
        return [ranks[0] for i, ranks in enumerate(topology.nodes) if i != topology.node_rank]

    # -- ringing ---------------------------------------------------------------------------------------

    def ring_own(self) -> None:
        """Wake this rank's waiting thread."""
        self._change(self._mine)

    def ring_others(self, cycle: int) -> None:
        """Tell all other ranks that they are awaited in cycle number `cycle`."""
        self._ring_host(cycle)
        note = torch.tensor([cycle])
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self._sent += [(self._wire.isend(note, peer), note) for peer in self._peers]

    def _ring_host(self, cycle: int) -> None:
        for local_rank in self._locals:
            word = local_rank * self._stride + CYCLE
            if self._words[word] < cycle:
                self._words[word] = cycle
                self._change(local_rank)

    def _change(self, local_rank: int) -> None:
        word = local_rank * self._stride + CHANGE
        self._words[word] = time.monotonic_ns()
        self._futex.wake(word)

    # -- waiting ---------------------------------------------------------------------------------------

    def state(self) -> int:
        """Return what `sleep` compares: ask before looking at what might be there to do."""
        return self._words[self._mine * self._stride + CHANGE]

    def wanted(self) -> int:
        """Return the newest cycle that others wait for this rank in."""
        if self._listens:
            self._listen()
        return self.has_rung()

    def has_rung(self) -> int:
        """Return what `wanted` does, as far as this rank has heard by now; for threads that do not wait."""
        return self._words[self._mine * self._stride + CYCLE]

    def sleep(self, state: int, limit_s: float) -> None:
        """Sleep until somebody rings, not at all if somebody has since `state` was asked."""
        if self._listens:
            limit_s = min(limit_s, self._nap_s)
        if self._futex.available:
            self._futex.wait(self._mine * self._stride + CHANGE, state, limit_s)
        else:
            time.sleep(min(limit_s, self._nap_s))
        self._nap_s = min(self._nap_s * SLACK, LONGEST_NAP_S) if self.state() == state else NAP_S

    def _listen(self) -> None:
        """Take in the messages of other hosts, and pass them on."""
        while True:
            if self._request is None:
                self._request = self._wire.irecv(self._inbox, None)
            if self._wire.poll_one(self._request) is None:
                return
            self._request, cycle = None, int(self._inbox)
            self._nap_s = NAP_S
            word = self._mine * self._stride + CYCLE
            self._words[word] = max(self._words[word], cycle)
            self._ring_host(cycle)

    def close(self) -> None:
        """Give up waiting for messages; all ranks have left."""
        if self._request is not None:
            with contextlib.suppress(MpisgdError):
                self._wire.cancel(self._request, self._inbox)
        self._request = None


def _private_segment(size: int) -> Segment:
    """Return memory of this process alone in the place of what the host's ranks could not share."""
    fd = os.memfd_create("mpisgd")
    os.ftruncate(fd, PAGE * size)
    segment = Segment(fd, PAGE, size)
    os.close(fd)
    return segment
