"""The control block: a few words per rank, through which the ranks of a host wait for each other.

Every rank counts its arrivals in a word of its own. Nobody else writes it, so no atomic operation is needed:
a rank has arrived when its count is as large as mine. On x86 stores become visible in order; elsewhere a lock
orders them (`order_memory`).
"""

import platform
import threading
from collections.abc import Callable, Iterable, Iterator

from mpisgd.core.waiting import Backoff, is_oversubscribed
from mpisgd.transport.shm.futex import Futex
from mpisgd.transport.shm.segment import PAGE, Segment

__all__ = ["CONTROL_BYTES", "ControlBlock"]

CONTROL_BYTES = PAGE  # at the beginning of every rank's share; a page of its own, so a cache line of its own
WORD_BYTES = 8
# Words, in cache lines of their own: the count of arrivals; two digests, used in turn; the count of what a
# speaker has finished; the verdict of other hosts with the number of its turn; whether it works in others'
# memory; whether it has left an operation before its end; an address.
ARRIVALS, DIGESTS, FINISHED, VERDICT, WRITES, HAS_LEFT, OFFER = 0, 8, 16, 24, 32, 40, 48

_STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")
_fence = threading.Lock()


class ControlBlock:
    """This rank's view of the control words of its host.

    `meanwhile` is called again and again while others are missing: they may be waiting for a message of this
    rank, and MPI moves large ones only while somebody asks it to.

    Attributes:
        arrivals: how often this rank has arrived.
        meanwhile: see above; may be replaced.
    """

    def __init__(self, segment: Segment, rank: int, size: int, meanwhile: Callable[[], None]) -> None:
        self.rank = rank
        self.meanwhile = meanwhile
        self.arrivals = 0
        self._words = memoryview(segment.memory).cast("Q")
        self._bell = Futex(segment)
        stride = segment.share_bytes // WORD_BYTES
        self._mine = rank * stride
        self._all = [other * stride for other in range(size)]
        self._others = [other * stride for other in range(size) if other != rank]

    def arrive(self) -> None:
        """Count one arrival; all that this rank wrote before is visible to those who see it."""
        self.arrivals += 1
        self._publish(self._mine + ARRIVALS, self.arrivals)

    def _publish(self, word: int, value: int) -> None:
        """Write a word that others wait for, after all that was written before."""
        order_memory()
        self._words[word] = value
        if is_oversubscribed() and self._bell.available:
            self._bell.ring(word)

    def all_here(self) -> bool:
        """Return whether every rank has arrived as often as this one."""
        words, mine = self._words, self.arrivals
        for other in self._others:
            if words[other + ARRIVALS] < mine:
                return self._not_yet()
        order_memory()
        return True

    def missing(self) -> list[int]:
        """Return the local ranks that have not arrived as often as this one."""
        return [i for i, at in enumerate(self._all) if self._words[at + ARRIVALS] < self.arrivals]

    def barrier(self, limit_s: float) -> bool:
        """Arrive, and return True once all have; False when the time limit came first."""
        self.arrive()
        return self.all_here() or Backoff(limit_s).wait_for(self.all_here, self.doze)

    def doze(self, limit_s: float) -> bool:
        """Sleep until one more rank has arrived; False where that cannot be had."""
        late = (other + ARRIVALS for other in self._others)
        return self._doze_on((word for word in late if self._words[word] < self.arrivals), limit_s)

    def _not_yet(self) -> bool:
        """Return False. One who is going to sleep does what is to be done meanwhile when it wakes in vain."""
        if not (is_oversubscribed() and self._bell.available):
            self.meanwhile()
        return False

    def _doze_on(self, late: Iterator[int], limit_s: float) -> bool:
        """Sleep until the first of the `late` words changes."""
        word = next(late, None)
        if word is not None and self._bell.available:
            value = self._words[word]
            self._bell.sleep(word, value, limit_s)
            if self._words[word] == value:
                self.meanwhile()
        return self._bell.available

    def show(self, digest: int, turn: int) -> None:
        """Put a digest where the others will look; `turn` alternates, so a fast rank overwrites nothing."""
        self._words[self._mine + DIGESTS + (turn & 1)] = digest

    def extremes(self, turn: int) -> tuple[int, int]:
        """Return the smallest and the largest digest that the ranks show."""
        words, place = self._words, DIGESTS + (turn & 1)
        low = high = words[self._mine + place]
        for other in self._others:
            if (seen := words[other + place]) != low:
                low, high = min(low, seen), max(high, seen)
        return low, high

    # -- see `mpisgd.transport.cma.peer_access` -----------------------------------------------------

    def begin_writing(self) -> bool:
        """Say that this rank reads and writes the memory of others; False if one of them has left."""
        self._words[self._mine + WRITES] = 1
        for other in self._others:
            if self._words[other + HAS_LEFT]:
                self.end_writing()
                return False
        return True

    def end_writing(self) -> None:
        """Say that this rank does not."""
        self._words[self._mine + WRITES] = 0

    def somebody_writes(self) -> bool:
        """Return whether another rank says that it does."""
        return any(self._words[other + WRITES] for other in self._others)

    def say_left(self) -> None:
        """Say that nobody may write into this rank's memory any more."""
        self._words[self._mine + HAS_LEFT] = 1

    def offer(self, address: int) -> None:
        """Show the others an address: they look after the next meeting, and meet again after that."""
        self._words[self._mine + OFFER] = address

    def offers(self) -> list[int]:
        """Return what everyone shows."""
        return [self._words[rank + OFFER] for rank in self._all]

    # -- what only groups on several hosts need: the first ranks of a host speak for the others ---------

    def finish(self, count: int) -> None:
        """Say that this rank has put `count` results where the others find them, ever."""
        self._publish(self._mine + FINISHED, count)

    def have_finished(self, ranks: Iterable[int], count: int) -> bool:
        """Return whether each of the local `ranks` has put down `count` results."""
        if any(self._words[self._all[other] + FINISHED] < count for other in ranks):
            return self._not_yet()
        order_memory()
        return True

    def doze_until_finished(self, ranks: Iterable[int], count: int, limit_s: float) -> bool:
        """Sleep until one more of `ranks` has put down results; False where that cannot be had."""
        words = (self._all[other] + FINISHED for other in ranks)
        return self._doze_on((word for word in words if self._words[word] < count), limit_s)

    def give_verdict(self, low: int, high: int, turn: int) -> None:
        """Tell the others of this host what the first rank has learned from other hosts."""
        at = self._mine + VERDICT
        self._words[at + 1], self._words[at + 2] = low, high
        self._publish(at, turn)

    def has_verdict(self, turn: int) -> bool:
        """Return whether the first rank has told what it learned in this turn."""
        if self._words[self._all[0] + VERDICT] < turn:
            return self._not_yet()
        order_memory()
        return True

    def doze_until_verdict(self, turn: int, limit_s: float) -> bool:
        """Sleep until the first rank has told what it learned; False where that cannot be had."""
        word = self._all[0] + VERDICT
        return self._doze_on(iter([word] if self._words[word] < turn else []), limit_s)

    def verdict(self) -> tuple[int, int]:
        """Return the smallest and the largest digest of all hosts."""
        at = self._all[0] + VERDICT
        return self._words[at + 1], self._words[at + 2]


def order_memory() -> None:
    """Keep loads and stores before this point before those after it, where the machine does not by itself."""
    if not _STORES_IN_ORDER:
        # Into what the lock encloses accesses may move from both sides and pass each other there; none moves
        # past a release and the acquire that follows it.
        for _ in range(2):
            _fence.acquire()
            _fence.release()
