"""`PieceExchange`: the all-reduce of one piece of one chunk between the hosts.

Each host finishes its own part of the piece: it gets everyone's sums of that part, combines them in the order
of the hosts, and hands the result to everyone. No byte travels more often than it must.

    host 0   has a0 b0   sends b0, gets a1  |  A = a0 + a1  |  sends A, gets B
    host 1   has a1 b1   sends a1, gets b0  |  B = b0 + b1  |  sends B, gets A

Nothing here waits. Whoever has several pieces in flight advances them in turn, so that the link is never idle
while one of them is between its two steps.
"""

import torch
from torch import Tensor

from mpisgd.transport.host_arithmetic import Arithmetic
from mpisgd.transport.internode.leader import Leader
from mpisgd.transport.messages.link import even_ranges

__all__ = ["PieceExchange"]

# On the queue's communicator; the consistency check and the algorithms use smaller ones.
SUMS_TAG, RESULTS_TAG = 80, 81


class PieceExchange:
    """The all-reduce of one piece between the hosts.

    Args:
        leader: of this host.
        partial: [n], this host's sum; overwritten.
        result: [n], where the result goes; may be `partial` itself.
        arithmetic: how to combine.

    Attributes:
        sends_results: whether this host has finished its part. Pieces must come to this in the order in which
            they began, as their messages are told apart by nothing else.
    """

    def __init__(self, leader: Leader, partial: Tensor, result: Tensor, arithmetic: Arithmetic) -> None:
        self._leader = leader
        self._arithmetic = arithmetic
        cuts = even_ranges(partial.numel(), len(leader.ranks))
        self._partials = [partial[start:stop] for start, stop in cuts]
        self._results = [result[start:stop] for start, stop in cuts]
        own = self._partials[leader.host]
        self._sums = [own if h == leader.host else torch.empty_like(own) for h in range(len(cuts))]
        self.sends_results = False
        self.requests = leader.start(SUMS_TAG, self._partials.__getitem__, self._sums.__getitem__)

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether the whole result is there."""
        if not self._leader.communicator.poll(self.requests):
            return False
        if self.sends_results:
            return True
        mine = self._results[self._leader.host]
        self._arithmetic.across(self._sums, mine)
        self.sends_results = True
        self.requests = self._leader.start(RESULTS_TAG, lambda _: mine, self._results.__getitem__)
        return self._leader.communicator.poll(self.requests)
