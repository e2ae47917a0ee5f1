"""`ShmDigestExchange`: among ranks that share a host, through the control block, without a message."""

from collections.abc import Sequence

from mpisgd.transport.shm.control_block import ControlBlock

__all__ = ["ShmDigestExchange"]


class ShmDigestExchange:
    """The spread in shared memory: show the digest, arrive, and look at everyone's once all are here.

    Args:
        control: of the host.
        ranks: what its ranks are called in messages, by local rank.
    """

    def __init__(self, control: ControlBlock, ranks: Sequence[int]) -> None:
        self._control = control
        self._ranks = ranks
        self._turn = 0
        self.doze = control.doze
        self.advance = control.all_here

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""
        self._turn += 1
        self._control.show(digest, self._turn)
        self._control.arrive()

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        return self._control.extremes(self._turn)

    def missing(self) -> str:
        """Say for whom this rank waits."""
        missing = [self._ranks[local] for local in self._control.missing()]
        return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
