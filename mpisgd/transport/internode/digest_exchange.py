"""`InternodeDigestExchange`: among ranks on several hosts: in memory on each, by messages between them.

On each host the ranks arrive at the control block; when all have, the first of them exchanges messages with
the other hosts, and at the end publishes the result for the others.
"""

from collections.abc import Sequence

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
        control: of this host; None where this rank is alone on it.
        between: how the hosts' first ranks go on from there; None on all others.
        ranks: what the ranks of this host are called in messages, by local rank.
    """

    def __init__(
        self,
        control: ControlBlock | None,
        between: Dissemination | LeaderExchange | None,
        ranks: Sequence[int],
    ) -> None:
        self._control = control
        self._between = between
        self._ranks = ranks
        self._turn = 0
        self._between_started = False

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""
        self._turn += 1
        self._between_started = False
        if self._control is not None:
            self._control.show_digest(digest, self._turn)
            self._control.arrive()
        else:
            self._start_between(digest, digest)

    def _start_between(self, low: int, high: int) -> None:
        assert self._between is not None
        self._between.start(low, high)
        self._between_started = True

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        control = self._control
        if self._between is None:
            assert control is not None
            return control.reached(RESULT, (0,), self._turn)
        if not self._between_started:
            assert control is not None
            if not control.all_arrived():
                return False
            self._start_between(*control.extremes(self._turn))
        if not self._between.advance():
            return False
        if control is not None:
            low, high = self._between.extremes()
            control.write(RESULT + 1, low)
            control.write(RESULT + 2, high)
            control.publish(RESULT, self._turn)
        return True

    def sleep(self, limit_s: float) -> bool:
        """Sleep for so long, or until a rank of this host wakes this one; messages cannot."""
        if self._control is None or self._between_started:
            return False
        if self._between is None:
            return self._control.sleep_until_reached(RESULT, (0,), self._turn, limit_s)
        return self._control.sleep(limit_s)

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        if self._between is not None:
            return self._between.extremes()
        assert self._control is not None
        return self._control.read(RESULT + 1, 0), self._control.read(RESULT + 2, 0)

    def missing(self) -> str:
        """Say for whom this rank waits."""
        if self._between is not None and self._between_started:
            return self._between.missing()
        assert self._control is not None
        here = [self._ranks[local] for local in self._control.missing()]
        if here:
            return f"rank{'s' * (len(here) > 1)} {', '.join(map(str, here))}"
        return f"the ranks of other hosts, with which rank {self._ranks[0]} exchanges messages"
