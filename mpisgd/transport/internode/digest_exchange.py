"""`InternodeDigestExchange`: among ranks on several hosts: in memory on each, by messages between them.

On each host the ranks arrive at the control block; when all have, the first of them exchanges messages with
the other hosts, and at the end publishes the result for the others.
"""

from mpisgd.threads.waiting import SHORT_YIELD_S, YIELD_S
from mpisgd.transport.internode.doubling_exchange import DoublingExchange
from mpisgd.transport.internode.leader_exchange import LeaderExchange
from mpisgd.transport.ipc.control_block import ControlBlock
from mpisgd.transport.messages.dissemination import Dissemination

__all__ = ["InternodeDigestExchange"]

# A word of the control block: the number of the turn whose result the first rank has published; the smallest
# and the largest digest are in the two words after it.
RESULT = 24


class InternodeDigestExchange:
    """The exchange over shared memory and messages.

    Args:
        here: among the ranks of this host; None where this rank is alone on it.
        between: how the hosts' first ranks go on from there; None on all others.
        first: what the first rank of this host is called in messages.
    """

    def __init__(
        self,
        here: ControlBlock | None,
        between: Dissemination | LeaderExchange | DoublingExchange | None,
        first: int,
    ) -> None:
        self._here = here
        self._between = between
        self._first = first
        self._between_started = False

    @property
    def yield_s(self) -> float:
        """Shorter where the first rank of the host exchanges messages meanwhile, which takes a while."""
        return SHORT_YIELD_S if self._between is None else YIELD_S

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""
        self._between_started = False
        if self._here is not None:
            self._here.start(digest)
        else:
            self._start_between(digest, digest)

    def _start_between(self, low: int, high: int) -> None:
        assert self._between is not None
        self._between.start(low, high)
        self._between_started = True

    def agree_soon(self) -> bool:
        """Go as far as possible without waiting; return whether all have come with one digest."""
        if not self.advance():
            return False
        low, high = self.extremes()
        return low == high

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        here, between = self._here, self._between
        if between is None:
            assert here is not None
            return here.reached(RESULT, (0,), here.turn)
        if not self._between_started:
            assert here is not None
            if not here.advance():
                return False
            self._start_between(*here.extremes())
        if not between.advance():
            return False
        if here is not None:
            low, high = between.extremes()
            here.write(RESULT + 1, low)
            here.write(RESULT + 2, high)
            here.publish(RESULT, here.turn)
        return True

    def sleep(self, limit_s: float) -> bool:
        """Sleep for so long, or until a rank of this host wakes this one; messages cannot."""
        if self._here is None or self._between_started:
            return False
        if self._between is None:
            return self._here.sleep_until_reached(RESULT, (0,), self._here.turn, limit_s)
        return self._here.sleep(limit_s)

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        if self._between is not None:
            return self._between.extremes()
        assert self._here is not None
        return self._here.read(RESULT + 1, 0), self._here.read(RESULT + 2, 0)

    def close(self) -> None:
        """Free what MPI keeps for it. Not collective; the communicator comes after."""
        if isinstance(self._between, Dissemination):
            self._between.close()

    def missing(self) -> str:
        """Describe the ranks that this rank waits for."""
        if self._between is not None and self._between_started:
            return self._between.missing()
        assert self._here is not None
        others = f"the ranks of other hosts, with which rank {self._first} exchanges messages"
        return self._here.missing() or others
