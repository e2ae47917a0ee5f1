"""`InternodeDigestExchange`: among ranks on several hosts: in memory on each, by messages between them.

On each host the ranks come together in the control block; when they have, the first of them speaks for the
host, and at the end shows the others what it has learned.
"""

from collections.abc import Sequence

from mpisgd.transport.internode.leader_exchange import LeaderExchange
from mpisgd.transport.messages.dissemination import Dissemination
from mpisgd.transport.shm.control_block import ControlBlock

__all__ = ["InternodeDigestExchange"]


class InternodeDigestExchange:
    """The spread over shared memory and messages.

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
        self._speaking = False

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""
        self._turn += 1
        self._speaking = False
        if self._control is not None:
            self._control.show(digest, self._turn)
            self._control.arrive()
        else:
            self._speak(digest, digest)

    def _speak(self, low: int, high: int) -> None:
        assert self._between is not None
        self._between.start(low, high)
        self._speaking = True

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        if self._between is None:
            assert self._control is not None
            return self._control.has_verdict(self._turn)
        if not self._speaking:
            assert self._control is not None
            if not self._control.all_here():
                return False
            self._speak(*self._control.extremes(self._turn))
        if not self._between.advance():
            return False
        if self._control is not None:
            self._control.give_verdict(*self._between.extremes(), self._turn)
        return True

    def doze(self, limit_s: float) -> bool:
        """Sleep for so long, or until a rank of this host wakes this one; messages cannot."""
        if self._control is None or self._speaking:
            return False
        if self._between is None:
            return self._control.doze_until_verdict(self._turn, limit_s)
        return self._control.doze(limit_s)

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        if self._between is not None:
            return self._between.extremes()
        assert self._control is not None
        return self._control.verdict()

    def missing(self) -> str:
        """Say for whom this rank waits."""
        if self._between is not None and self._speaking:
            return self._between.missing()
        assert self._control is not None
        here = [self._ranks[local] for local in self._control.missing()]
        if here:
            return f"rank{'s' * (len(here) > 1)} {', '.join(map(str, here))}"
        return f"the ranks of other hosts, with which rank {self._ranks[0]} speaks"
