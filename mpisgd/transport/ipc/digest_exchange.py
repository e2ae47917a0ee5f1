"""`ShmDigestExchange`: among ranks that share a host, through the control block, without a message."""

from collections.abc import Sequence

from mpisgd.transport.ipc.control_block import ControlBlock

__all__ = ["ShmDigestExchange"]


class ShmDigestExchange:
    """The exchange in shared memory: write the digest, arrive, and read everyone's once all have arrived.

    Args:
        control: of the host.
        ranks: what its ranks are called in messages, by local rank.
    """

    def __init__(self, control: ControlBlock, ranks: Sequence[int]) -> None:
        self._control = control
        self._ranks = ranks
        self._turn = 0
        self.sleep = control.sleep
        self.advance = control.all_arrived

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""
        self._turn += 1
        self._control.show_digest(digest, self._turn)
        self._control.arrive()

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        return self._control.extremes(self._turn)

    def missing(self) -> str:
        """Say for whom this rank waits."""
        missing = [self._ranks[local] for local in self._control.missing()]
        return f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
