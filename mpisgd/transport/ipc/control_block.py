"""The control block: a few words per rank of a host in shared memory, a barrier and an exchange of digests.

Every rank counts its arrivals in a word of its own. Nobody else writes it, so no atomic operation is needed:
a rank has arrived when its count is as large as mine. On x86 stores become visible in order; elsewhere a lock
orders them (`order_memory`). A rank that sleeps until a word changes does so by futex.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from mpisgd.arguments import ranks_text
from mpisgd.threads import scheduling
from mpisgd.threads.waiting import BUSY_S, YIELD_S, Backoff, is_oversubscribed
from mpisgd.transport.ipc.futex import Futex
from mpisgd.transport.ipc.segment import PAGE, Segment

__all__ = ["CONTROL_BYTES", "ControlBlock"]

CONTROL_BYTES = PAGE  # at the beginning of every rank's share; a page of its own, so a cache line of its own
WORD_BYTES = 8
# Words, in cache lines of their own: the count of arrivals; two digests, used in turn. Other transports keep
# theirs from 16 on: see `mpisgd.transport.internode` and `mpisgd.transport.cma.peer_access`.
ARRIVALS, DIGESTS = 0, 8
# In the other half of a rank's page: for each local rank a byte, 1 while that one sleeps until a word of this
# rank changes. To wake nobody takes a system call, which is a quarter of what a barrier costs.
SLEEPERS = CONTROL_BYTES // 2

_STORES_IN_ORDER = platform.machine() in ("x86_64", "AMD64", "i686")
_fence = threading.Lock()


class ControlBlock:
    """The control words of a host, as this rank sees them; the `DigestExchange` of ranks that share a host.

    `progress` is called again and again while others are missing: they may be waiting for a message of this
    rank, and MPI moves large ones only while somebody asks it to.

    Args:
        segment: of the host, with CONTROL_BYTES at the beginning of every rank's share.
        rank: this one among those of the host.
        ranks: what these are called in messages.
        progress: see above.

    Attributes:
        arrivals: how often this rank has arrived.
        progress: as given; may be replaced.
        turn: how many exchanges this rank has started.
    """

    def __init__(
        self, segment: Segment, rank: int, ranks: Sequence[int], progress: Callable[[], None]
    ) -> None:
        self.progress = progress
        self.arrivals = 0
        self.turn = 0
        self._ranks = ranks
        self._words = memoryview(segment.memory).cast("Q")
        self._bytes = memoryview(segment.memory)
        self._futex = Futex(segment.memory)
        stride = segment.share_bytes // WORD_BYTES
        self._rank = rank
        self._share_bytes = segment.share_bytes
        self._mine = rank * stride
        # Elsewhere no order of a store and a later load can be had without the kernel's help.
        knows_sleepers = _STORES_IN_ORDER and SLEEPERS + len(ranks) <= CONTROL_BYTES
        first = self._mine + SLEEPERS // WORD_BYTES
        words = -(-len(ranks) // WORD_BYTES)
        self._sleepers = range(first, first + words) if knows_sleepers else None
        self._all = [other * stride for other in range(len(ranks))]
        self._others = [at for at in self._all if at != self._mine]
        # For each turn where the others' digests are.
        self._digests_of_others = [[at + DIGESTS + turn for at in self._others] for turn in (0, 1)]
        self._digest = 0

    yield_s = 0.0  # `agree_soon` has done so

    # -- words -----------------------------------------------------------------------------------------

    def write(self, word: int, value: int) -> None:
        """Write a word of this rank that nobody sleeps on."""
        self._words[self._mine + word] = value

    def read(self, word: int, rank: int) -> int:
        """Return a word of a local rank."""
        return self._words[self._all[rank] + word]

    def read_all(self, word: int) -> list[int]:
        """Return this word of every local rank."""
        words = self._words
        return [words[at + word] for at in self._all]

    def publish(self, word: int, value: int) -> None:
        """Write a word that others wait for, after all that this rank wrote before, and wake them."""
        if not _STORES_IN_ORDER:
            order_memory()
        self._words[self._mine + word] = value
        if is_oversubscribed() and self._futex.available and self._somebody_sleeps():
            self._futex.wake(self._mine + word)

    def _somebody_sleeps(self) -> bool:
        """Return whether a rank sleeps, or is about to, until a word of this one changes; True if unknown.

        One that is about to has said so before the kernel compares the word, which was written before this.
        """
        if self._sleepers is None:
            return True
        with _fence:  # else the processor may read the bytes before others see the word
            pass
        words = self._words
        for at in self._sleepers:  # noqa: SIM110 (as a generator it takes three times as long)
            if words[at]:
                return True
        return False

    def reached(self, word: int, ranks: Iterable[int], count: int) -> bool:
        """Return whether this word of each of the local `ranks` is at least `count`."""
        if any(self._words[self._all[rank] + word] < count for rank in ranks):
            return self._not_yet()
        order_memory()
        return True

    def sleep_until_reached(self, word: int, ranks: Iterable[int], count: int, limit_s: float) -> bool:
        """Sleep until one more of the `ranks` may have reached `count`; False where that cannot be had."""
        if not self._futex.available:
            return False
        for rank in ranks:
            late = self._all[rank] + word
            if (value := self._words[late]) < count:
                self._say_asleep(rank, True)
                self._futex.wait(late, value, limit_s)
                self._say_asleep(rank, False)
                if self._words[late] == value:
                    self.progress()
                break
        return True

    def _say_asleep(self, rank: int, sleeps: bool) -> None:
        """Tell a local rank whether this one sleeps until one of its words changes."""
        if self._sleepers is not None:
            self._bytes[rank * self._share_bytes + SLEEPERS + self._rank] = sleeps

    def _not_yet(self) -> bool:
        """Return False. A rank that is going to sleep makes progress when it wakes for nothing."""
        if not (is_oversubscribed() and self._futex.available):
            self.progress()
        return False

    # -- the barrier -----------------------------------------------------------------------------------

    def arrive(self) -> None:
        """Count one arrival; all that this rank wrote before is visible to the ranks that see it."""
        self.arrivals += 1
        self.publish(ARRIVALS, self.arrivals)

    def all_arrived(self) -> bool:
        """Return whether every rank has arrived as often as this one."""
        words, mine = self._words, self.arrivals
        for other in self._others:
            if words[other + ARRIVALS] < mine:
                return self._not_yet()
        order_memory()
        return True

    advance = all_arrived

    def missing(self) -> str:
        """Describe the ranks that have not arrived as often as this one; "" if all have."""
        pairs = zip(self._ranks, self.read_all(ARRIVALS), strict=True)
        late = [rank for rank, arrivals in pairs if arrivals < self.arrivals]
        return ranks_text(late) if late else ""

    def barrier(self, limit_s: float) -> bool:
        """Arrive, and return True once all have; False when the timeout came first."""
        self.arrive()
        return self.all_arrived() or Backoff(limit_s).wait_for(self.all_arrived, self.sleep)

    def sleep(self, limit_s: float) -> bool:
        """Sleep until one more rank may have arrived; False where that cannot be had."""
        return self.sleep_until_reached(ARRIVALS, range(len(self._all)), self.arrivals, limit_s)

    # -- digests ---------------------------------------------------------------------------------------

    def start(self, digest: int) -> None:
        """Begin an exchange with this rank's digest. Two words alternate: a fast rank overwrites nothing."""
        if not _STORES_IN_ORDER:
            order_memory()
        self.turn = turn = self.turn + 1
        self._digest = self._words[self._mine + DIGESTS + (turn & 1)] = digest
        self.arrivals = arrivals = self.arrivals + 1
        self.publish(ARRIVALS, arrivals)

    def agree_soon(self) -> bool:
        """Wait a moment for the others; return whether all have come with this rank's digest.

        Small messages feel every call, so only the digests are looked at: what a rank has left in that word
        two exchanges ago is another one.
        """
        words, digest, until_s, yields = self._words, self._digest, 0.0, False
        for place in self._digests_of_others[self.turn & 1]:
            while words[place] != digest:
                now_s = time.monotonic()
                if not until_s:
                    if scheduling.is_installed():  # nobody comes before this rank hands over
                        return False
                    yields = is_oversubscribed()
                    until_s = now_s + (YIELD_S if yields else BUSY_S)
                elif now_s > until_s:
                    return False
                if yields:
                    os.sched_yield()
        if not _STORES_IN_ORDER:
            order_memory()
        return True

    def extremes(self) -> tuple[int, int]:
        """Return the smallest and the largest digest, once all ranks have arrived."""
        words, place = self._words, DIGESTS + (self.turn & 1)
        low = high = words[self._mine + place]
        for other in self._others:
            if (seen := words[other + place]) != low:
                low, high = min(low, seen), max(high, seen)
        return low, high

    def close(self) -> None:
        """Nothing: the words are freed with the segment."""


def order_memory() -> None:
    """Keep loads and stores before this point before those after it, where the machine does not by itself."""
    if not _STORES_IN_ORDER:
        # Accesses may move into a critical section from both sides and pass each other there; none moves past
        # a release and the acquire that follows it.
        for _ in range(2):
            _fence.acquire()
            _fence.release()
