"""`WakeUp`: a rank with nothing to do sleeps until another rank, or one of its own threads, wakes it.

On one host the ranks sleep on a word of shared memory (a futex). Between hosts a message of one integer wakes
the first rank of a host, which polls for it every few milliseconds while it sleeps, and wakes the others.
"""

import contextlib
import time
from typing import TYPE_CHECKING, Any

import torch

from mpisgd.errors import MpisgdError
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.transport.ipc.futex import Futex
from mpisgd.transport.ipc.segment import PAGE, Segment, open_segment

if TYPE_CHECKING:
    from mpisgd.core.topology import Topology

__all__ = ["WakeUp"]

# Words of a rank: one that changes whenever it is woken, and the newest cycle in which others wait for it.
CHANGE, CYCLE = 0, 8
# How often messages from other hosts are polled for: at first, at last, and the backoff in between.
POLL_INTERVAL_S, MAX_POLL_INTERVAL_S, BACKOFF = 0.002, 0.02, 1.01


class WakeUp:
    """Puts a thread of this rank to sleep, and wakes those of all ranks of a job; any thread may wake.

    Args:
        communicator: a communicator of its own over all ranks.
        local: over the ranks of this host.
        topology: of `communicator`.
    """

    def __init__(
        self, communicator: GroupCommunicator, local: GroupCommunicator, topology: "Topology"
    ) -> None:
        self._communicator = communicator
        self._mine = topology.local_rank
        segment = open_segment(local, PAGE)
        # Where the host's ranks cannot share any, memory of this process alone.
        self._segment: Segment = segment if segment is not None else Segment(-1, PAGE, local.size)
        self._unshared = segment is None  # then all ranks are woken by messages
        self._words = memoryview(self._segment.memory).cast("Q")
        self._futex = Futex(self._segment.memory)
        self._stride = self._segment.share_bytes // 8
        self._locals = [] if self._unshared else [i for i in range(local.size) if i != self._mine]
        others = [rank for rank in range(topology.size) if rank != topology.rank]
        firsts = [ranks[0] for i, ranks in enumerate(topology.nodes) if i != topology.node_rank]
        self._peers = others if self._unshared else firsts
        self._polls = self._unshared or (bool(self._peers) and self._mine == 0)
        self._poll_interval_s = POLL_INTERVAL_S
        self._request: Any = None
        self._inbox = torch.zeros(1, dtype=torch.int64)
        self._sent: list[tuple[Any, torch.Tensor]] = []

    # -- waking ----------------------------------------------------------------------------------------

    def wake_own(self) -> None:
        """Wake this rank's sleeping threads."""
        self._change(self._mine)

    def wake_others(self, cycle: int) -> None:
        """Wake all other ranks for cycle number `cycle`."""
        self._wake_host(cycle)
        note = torch.tensor([cycle])
        self._sent = [(request, kept) for request, kept in self._sent if not request.Test()]
        self._sent += [(self._communicator.isend(note, peer), note) for peer in self._peers]

    def _wake_host(self, cycle: int) -> None:
        for local_rank in self._locals:
            word = local_rank * self._stride + CYCLE
            if self._words[word] < cycle:
                self._words[word] = cycle
                self._change(local_rank)

    def _change(self, local_rank: int) -> None:
        word = local_rank * self._stride + CHANGE
        self._words[word] = time.monotonic_ns()
        self._futex.wake(word)

    # -- sleeping --------------------------------------------------------------------------------------

    def state(self) -> int:
        """Return the value that `sleep` compares; to be read before looking for something to do."""
        return self._words[self._mine * self._stride + CHANGE]

    def requested_cycle(self) -> int:
        """Return the newest cycle in which others wait for this rank."""
        if self._polls:
            self._poll()
        return self.known_cycle()

    def known_cycle(self) -> int:
        """As `requested_cycle`, without polling for messages; from any thread."""
        return self._words[self._mine * self._stride + CYCLE]

    def sleep(self, state: int, limit_s: float) -> None:
        """Sleep until this rank is woken, not at all if it was since `state` was asked."""
        if self._polls:
            limit_s = min(limit_s, self._poll_interval_s)
        if self._futex.available:
            self._futex.wait(self._mine * self._stride + CHANGE, state, limit_s)
        else:
            time.sleep(min(limit_s, self._poll_interval_s))
        was_woken = self.state() != state
        longer_s = min(self._poll_interval_s * BACKOFF, MAX_POLL_INTERVAL_S)
        self._poll_interval_s = POLL_INTERVAL_S if was_woken else longer_s

    def _poll(self) -> None:
        """Receive the messages of other hosts, and wake the ranks of this one."""
        while True:
            if self._request is None:
                self._request = self._communicator.irecv(self._inbox, None)
            if self._communicator.poll_one(self._request) is None:
                return
            self._request, cycle = None, int(self._inbox)
            self._poll_interval_s = POLL_INTERVAL_S
            word = self._mine * self._stride + CYCLE
            self._words[word] = max(self._words[word], cycle)
            self._wake_host(cycle)

    def close(self) -> None:
        """Cancel the receive; all ranks have left."""
        if self._request is not None:
            with contextlib.suppress(MpisgdError):
                self._communicator.cancel(self._request, self._inbox)
        self._request = None
