"""`DoublingExchange`: what `LeaderExchange` does, between many hosts: in a logarithmic number of rounds.

In round k hosts whose numbers differ in bit k exchange what they know: the smallest and the largest digest,
and, where the operation is on a small tensor, what the hosts so far have added up to. Both add in the order
of the hosts, so all end with the same bits. Hosts beyond a power of two hand what they have to a partner
before, and get the result afterwards.
"""

from collections.abc import Iterator

from mpisgd.interfaces.communicator import Request
from mpisgd.transport.internode.leader import Leader
from mpisgd.transport.internode.leader_exchange import HEADER_BYTES, HostMessages, Payload

__all__ = ["DoublingExchange"]

# On the queue's communicator: below the algorithms', above the mark of a rank that has left.
FIRST_TAG, LAST_TAG = 48, 63


class DoublingExchange:
    """The exchange. Cost: floor(log2(hosts)) messages one after the other, two more for a rest.

    Args:
        leader: this rank, the first of its host.
        messages: room for this host's, where the result will be, and for one that comes.

    Attributes:
        payload: what this host sends along, and how two hosts' become one; taken when the next exchange
            starts.
    """

    def __init__(self, leader: Leader, messages: HostMessages) -> None:
        self._leader = leader
        self._messages = messages
        self.payload: Payload | None = None
        self._requests: list[Request] = []
        self._steps: Iterator[list[Request]] = iter(())
        self._partner = 0

    def start(self, low: int, high: int) -> None:
        """Begin with the extremes of this host."""
        payload, self.payload = self.payload, None
        self._messages.write(0, low, high)
        nbytes = HEADER_BYTES + (0 if payload is None else payload.write())
        self._steps = self._rounds(nbytes, payload)
        self._requests = next(self._steps)

    def _rounds(self, nbytes: int, payload: Payload | None) -> Iterator[list[Request]]:
        leader, (mine, theirs) = self._leader, self._messages.memory
        host, num_hosts = leader.host, len(leader.ranks)
        num_rounds = num_hosts.bit_length() - 1
        power, known = 1 << num_rounds, mine[:nbytes]
        if host >= power:
            self._partner = host - power
            yield leader.send(FIRST_TAG, self._partner, known)
            yield leader.receive(LAST_TAG, self._partner, mine)
            return
        if host + power < num_hosts:
            self._partner = host + power
            yield leader.receive(FIRST_TAG, self._partner, theirs)
            self._take_in(payload, is_first=False)
        for number in range(num_rounds):
            self._partner = host ^ (1 << number)
            tag = FIRST_TAG + 1 + number
            yield [*leader.receive(tag, self._partner, theirs), *leader.send(tag, self._partner, known)]
            self._take_in(payload, is_first=self._partner < host)
        if host + power < num_hosts:
            self._partner = host + power
            yield leader.send(LAST_TAG, self._partner, known)

    def _take_in(self, payload: Payload | None, *, is_first: bool) -> None:
        """Add what has come, as that of an earlier or a later host."""
        self._messages.write(0, *self._messages.extremes())
        if payload is not None:
            payload.add(*((1, 0) if is_first else (0, 1)))

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        while self._requests and self._leader.communicator.poll(self._requests):
            self._requests = next(self._steps, [])
        return not self._requests

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        return self._messages.extremes_of(0)

    def missing(self) -> str:
        """Describe the ranks that this rank waits for."""
        rank = self._leader.communicator.global_ranks[self._leader.ranks[self._partner]]
        return f"rank {rank}, which has not come or waits for another rank itself"
