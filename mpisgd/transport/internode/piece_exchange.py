"""`PieceExchange`: the all-reduce of one piece of one chunk between the hosts, in one of two ways.

`direct`, between few hosts: each finishes its own part of the piece. It gets everyone's sums of that part,
combines them in the order of the hosts, and hands the result to everyone.

    host 0   has a0 b0   sends b0, gets a1  |  A = a0 + a1  |  sends A, gets B
    host 1   has a1 b1   sends a1, gets b0  |  B = b0 + b1  |  sends B, gets A

`halving`, between many of which there are a power of two: in round k hosts whose numbers differ in bit k
exchange halves of what they still have, and add; then they hand the results back the same way. A host sends
2 log2(hosts) messages instead of 2 (hosts - 1). The order of additions is a tree over neighbouring hosts.

No byte travels more often than it must, in either. Nothing here waits: whoever has several pieces in flight
advances them in turn, so that the link is never idle while one of them is between its steps.

Source of `halving`: Rabenseifner 2004, "Optimization of collective reduction operations".
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.transport.host_arithmetic import Arithmetic
from mpisgd.transport.internode.leader import Leader
from mpisgd.transport.internode.schedule import halves
from mpisgd.transport.messages.link import even_ranges

__all__ = ["PieceExchange", "direct", "exchange_of", "halving"]

# On the queue's communicator; the consistency check and the algorithms use smaller ones. Those of the rounds
# of `halving` follow, and then those of its way back.
SUMS_TAG, RESULTS_TAG = 80, 81
HALVING_TAG, BACK_TAG = 96, 128

Steps = Iterator[list[Request]]


class PieceExchange:
    """One exchange, from the first messages to the last.

    Args:
        communicator: of the messages.
        steps: begins the messages of each step, when those of the step before are over.

    Attributes:
        requests: what is under way.
        num_begun: how many steps have begun. Pieces must come to a step in the order in which they began, as
            their messages are told apart by nothing else.
    """

    def __init__(self, communicator: GroupCommunicator, steps: Steps) -> None:
        self._communicator = communicator
        self._steps = steps
        self._is_over = False
        self.requests = next(steps)
        self.num_begun = 1

    def advance(self, most: int | None = None) -> bool:
        """Go as far as possible without waiting; return whether the whole result is there.

        Args:
            most: how many steps may have begun; None: all.
        """
        while not self._is_over and self._communicator.poll(self.requests):
            if self.num_begun == most:
                return False
            begun = next(self._steps, None)  # of few elements, a step may have no messages
            self.requests, self._is_over = begun or [], begun is None
            self.num_begun += 1
        return self._is_over


def exchange_of(leader: Leader, partial: Tensor, result: Tensor, arithmetic: Arithmetic) -> PieceExchange:
    """Begin the exchange of a piece in the way that suits the hosts; the same on all of them.

    Args:
        leader: of this host.
        partial: [n], this host's sum; overwritten.
        result: [n], where the result goes; may be `partial` itself.
        arithmetic: how to combine.
    """
    # Sums that travel on are not rounded: 16-bit floats would take twice the bytes.
    travels_on = arithmetic.partial == arithmetic.total
    way = halving if travels_on and halves(len(leader.ranks)) else direct
    return PieceExchange(leader.communicator, way(leader, partial, result, arithmetic))


def direct(leader: Leader, partial: Tensor, result: Tensor, arithmetic: Arithmetic) -> Steps:
    """Everyone with everyone; see `exchange_of` for the arguments. Two steps."""
    cuts = even_ranges(partial.numel(), len(leader.ranks))
    partials = [partial[start:stop] for start, stop in cuts]
    results = [result[start:stop] for start, stop in cuts]
    own, mine = partials[leader.host], results[leader.host]
    sums = [own if host == leader.host else torch.empty_like(own) for host in range(len(cuts))]
    yield leader.start(SUMS_TAG, partials.__getitem__, sums.__getitem__)
    arithmetic.across(sums, mine)
    yield leader.start(RESULTS_TAG, lambda _: mine, results.__getitem__)


def halving(leader: Leader, partial: Tensor, result: Tensor, arithmetic: Arithmetic) -> Steps:
    """Recursive halving and doubling; see `exchange_of` for the arguments. 2 log2(hosts) steps."""
    num_rounds, host = (len(leader.ranks) - 1).bit_length(), leader.host
    passing_on = arithmetic._replace(divisor=1)
    start, stop = 0, partial.numel()
    room = torch.empty((stop + 1) // 2, dtype=partial.dtype)
    parts: list[tuple[slice, slice]] = []  # by round, what this host keeps, and its partner
    for number in range(num_rounds):
        bit, middle = 1 << number, (start + stop) // 2
        lower, upper = slice(start, middle), slice(middle, stop)
        kept, given = (upper, lower) if host & bit else (lower, upper)
        parts.append((kept, given))
        mine, theirs = partial[kept], room[: kept.stop - kept.start]
        yield leader.exchange(HALVING_TAG + number, host ^ bit, partial[given], theirs)
        pair = (theirs, mine) if host & bit else (mine, theirs)
        if number + 1 < num_rounds:
            passing_on.across(pair, mine)
        else:
            arithmetic.across(pair, result[kept])
        start, stop = kept.start, kept.stop
    for number, (kept, given) in reversed([*enumerate(parts)]):
        yield leader.exchange(BACK_TAG + number, host ^ (1 << number), result[kept], result[given])
