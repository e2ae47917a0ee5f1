"""`ShmDigestExchange`: among ranks that share a host, through the control block, without a message."""

from collections.abc import Sequence

from mpisgd.transport.ipc.control_block import ControlBlock

__all__ = ["ShmDigestExchange"]


class ShmDigestExchange:
    """The exchange in shared memory: write the digest, arrive, and read everyone's once all have arrived.

    Args:
        control: of the host; also an attribute.
        ranks: what its ranks are called in messages, by local rank.

    Attributes:
        turn: how many exchanges this rank has started.
    """

    def __init__(self, control: ControlBlock, ranks: Sequence[int]) -> None:
        self.control = control
        self._ranks = ranks
        self.turn = 0
        self.sleep = control.sleep
        self.advance = control.all_arrived

    def start(self, digest: int) -> None:
        """Begin with this rank's digest."""
        self.turn += 1
        self.control.show_digest(digest, self.turn)
        self.control.arrive()

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest."""
        return self.control.extremes(self.turn)

    def missing(self) -> str:
        """Describe the ranks that this rank waits for; "" if for none."""
        missing = [str(self._ranks[local]) for local in self.control.missing()]
        return f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}" if missing else ""
