"""The control block: a few words per rank, through which the ranks of a host wait for each other.

Every rank counts its arrivals in a word of its own. Nobody else writes it, so no atomic operation is needed:
a rank has arrived when its count is as large as mine. On x86 stores become visible in order; elsewhere taking
and releasing a lock orders them, as POSIX demands of it.
"""

import platform
import threading
from collections.abc import Callable

from mpisgd.comm.node.segment import PAGE, Segment
from mpisgd.comm.waiting import Patience

__all__ = ["CONTROL_BYTES", "ControlBlock"]

CONTROL_BYTES = PAGE  # at the beginning of every rank's share; a page of its own, so a cache line of its own
WORD_BYTES = 8
ARRIVALS, DIGESTS = 0, 8  # words: the count; then two digests, used in turn

_STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")
_fence = threading.Lock()


class ControlBlock:
    """This rank's view of the control words of its host.

    `meanwhile` is called again and again while others are missing: they may be waiting for a message of this
    rank, and MPI moves large ones only while somebody asks it to.

    Attributes:
        arrivals: how often this rank has arrived.
    """

    def __init__(self, segment: Segment, rank: int, size: int, meanwhile: Callable[[], None]) -> None:
        self.rank = rank
        self._meanwhile = meanwhile
        self.arrivals = 0
        self._words = memoryview(segment.memory).cast("Q")
        stride = segment.share_bytes // WORD_BYTES
        self._mine = rank * stride
        self._all = [other * stride for other in range(size)]
        self._others = [other * stride for other in range(size) if other != rank]

    def arrive(self) -> None:
        """Count one arrival; all that this rank wrote before is visible to those who see it."""
        self.arrivals += 1
        order_memory()
        self._words[self._mine + ARRIVALS] = self.arrivals

    def all_here(self) -> bool:
        """Return whether every rank has arrived as often as this one."""
        words, mine = self._words, self.arrivals
        for other in self._others:
            if words[other + ARRIVALS] < mine:
                self._meanwhile()
                return False
        order_memory()
        return True

    def missing(self) -> list[int]:
        """Return the local ranks that have not arrived as often as this one."""
        return [i for i, at in enumerate(self._all) if self._words[at + ARRIVALS] < self.arrivals]

    def barrier(self, limit_s: float) -> bool:
        """Arrive, and return True once all have; False when the time limit came first."""
        self.arrive()
        return self.all_here() or Patience(limit_s).wait_for(self.all_here)

    def show(self, digest: int, turn: int) -> None:
        """Put a digest where the others will look; `turn` alternates, so a fast rank overwrites nothing."""
        self._words[self._mine + DIGESTS + (turn & 1)] = digest

    def extremes(self, turn: int) -> tuple[int, int]:
        """Return the smallest and the largest digest that the ranks show."""
        seen = [self._words[at + DIGESTS + (turn & 1)] for at in self._all]
        return min(seen), max(seen)


def order_memory() -> None:
    """Keep loads and stores before this point before those after it."""
    if not _STORES_IN_ORDER:
        with _fence:
            pass
