"""`ShmMailbox`: question and answer among the ranks of a host, in shared memory.

Each rank has a page of words and room for an answer. Who asks writes the time into the word ASKED of those it
asks, and wakes them; an answer carries the time at which it was begun, and answers what was asked before. It
is for everyone, so any number of ranks may ask at once and need not know of each other.
"""

import mmap
import time
import zlib
from typing import TYPE_CHECKING

from mpisgd import config
from mpisgd.transport.ipc.futex import Futex
from mpisgd.transport.ipc.segment import PAGE, Segment, open_segment

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["ShmMailbox", "open_board"]

ANSWER_BYTES = 2**18  # what is not written to takes no room
VERDICT_BYTES = 2**16
SHARE_BYTES = PAGE + ANSWER_BYTES + VERDICT_BYTES
# Words of a rank, in two cache lines: what others write, and what it writes itself; then the last stalls that
# it has told its user about, and how many there were.
ASKED, ANSWERED, LENGTH, CHECKSUM, LEFT, NUM_TOLD, TOLD = 0, 8, 9, 10, 11, 12, 64
MOST_TOLD = 64
# How many verdicts it has given, and the length and the checksum of the last.
NUM_VERDICTS, VERDICT_LENGTH, VERDICT_CHECKSUM = 32, 33, 34


class ShmMailbox:
    """This rank's view of its host's questions and answers.

    Args:
        segment: SHARE_BYTES for each rank.
        mine: this rank among those of the segment.
        size: how many there are.
    """

    def __init__(self, segment: Segment, mine: int, size: int) -> None:
        self.mine = mine
        self.size = size
        self._segment = segment  # keeps the memory
        self._bytes = memoryview(segment.memory)
        self._words = self._bytes.cast("Q")
        self._futex = Futex(segment)
        self._heard: dict[int, int] = {}  # by rank, how many of its verdicts

    def _word(self, rank: int, which: int) -> int:
        return rank * (SHARE_BYTES // 8) + which

    def _room(self, rank: int) -> int:
        return rank * SHARE_BYTES + PAGE

    # -- asking ----------------------------------------------------------------------------------------

    def ask(self, ranks: list[int]) -> int:
        """Ask some ranks of the segment; return the stamp from which on their answers count."""
        stamp = time.monotonic_ns()
        for rank in ranks:
            word = self._word(rank, ASKED)
            self._words[word] = max(stamp, self._words[word])
            self._futex.wake(word)
        return stamp

    def answer_of(self, rank: int, stamp: int) -> bytes | None:
        """Return the answer of a rank to what was asked at `stamp`, None while there is none."""
        words = self._words
        if words[self._word(rank, ANSWERED)] < stamp:
            return None
        start, length = self._room(rank), words[self._word(rank, LENGTH)]
        text = bytes(self._bytes[start : start + min(length, ANSWER_BYTES)])
        # It may be writing the next answer at this moment; then the text is asked for again.
        return text if zlib.crc32(text) == words[self._word(rank, CHECKSUM)] else None

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has said that it will answer no more."""
        return self._words[self._word(rank, LEFT)] != 0

    # -- answering -------------------------------------------------------------------------------------

    def asked(self) -> int:
        """Return the stamp of the last question to this rank; what `sleep` compares."""
        return self._words[self._word(self.mine, ASKED)]

    def stamp_of_answer(self) -> int:
        """Return the stamp of an answer that is begun now, after a look at `asked`.

        Of two ranks that ask at once, one may write its older stamp over the other's. That question was
        asked before now, too.
        """
        return max(self.asked(), time.monotonic_ns())

    def sleep(self, asked: int, limit_s: float) -> None:
        """Sleep until somebody asks, not at all if somebody has since `asked`."""
        if self._futex.available:
            self._futex.wait(self._word(self.mine, ASKED), asked, limit_s)
        elif self.asked() == asked:
            time.sleep(min(limit_s, 0.2))

    def wake(self) -> None:
        """Wake this rank's own thread."""
        self.ask([self.mine])

    def answer(self, text: bytes, stamp: int) -> None:
        """Put down the answer to all that was asked up to `stamp`, its own; at most ANSWER_BYTES."""
        words, start = self._words, self._room(self.mine)
        words[self._word(self.mine, CHECKSUM)] = 2**32  # no checksum: what is read meanwhile does not count
        self._bytes[start : start + len(text)] = text
        words[self._word(self.mine, LENGTH)] = len(text)
        words[self._word(self.mine, CHECKSUM)] = zlib.crc32(text)
        words[self._word(self.mine, ANSWERED)] = stamp

    def note_told(self, key: int) -> None:
        """Note that this rank has told its user about a stall."""
        count = self._word(self.mine, NUM_TOLD)
        self._words[self._word(self.mine, TOLD) + self._words[count] % MOST_TOLD] = key
        self._words[count] += 1

    def is_told(self, key: int) -> bool:
        """Return whether a rank of this host has told about a stall."""
        starts = [self._word(rank, TOLD) for rank in range(self.size)]
        return any(key in self._words[start : start + MOST_TOLD] for start in starts)

    def told(self) -> list[int]:
        """Return what this rank has told about."""
        start = self._word(self.mine, TOLD)
        return [key for key in self._words[start : start + MOST_TOLD] if key]

    # -- verdicts: see `mpisgd.monitor.deadlock_detector` -------------------------------------------

    def give_verdict(self, text: bytes, ranks: list[int]) -> None:
        """Put a text where all ranks of the segment find it, and wake some.

        One longer than VERDICT_BYTES has no room here: the others' waits end at their limits then.
        """
        if len(text) > VERDICT_BYTES:
            return
        start = self._room(self.mine) + ANSWER_BYTES
        self._bytes[start : start + len(text)] = text
        self._words[self._word(self.mine, VERDICT_LENGTH)] = len(text)
        self._words[self._word(self.mine, VERDICT_CHECKSUM)] = zlib.crc32(text)
        self._words[self._word(self.mine, NUM_VERDICTS)] += 1
        self.ask(ranks)

    def new_verdicts(self) -> list[bytes]:
        """Return what others have given since this was last called."""
        found = []
        for rank in range(self.size):
            count = self._words[self._word(rank, NUM_VERDICTS)]
            if count != self._heard.get(rank, 0) and rank != self.mine:
                start = self._room(rank) + ANSWER_BYTES
                text = bytes(self._bytes[start : start + self._words[self._word(rank, VERDICT_LENGTH)]])
                # It may be writing the next one at this moment; then this one is looked at again.
                if zlib.crc32(text) == self._words[self._word(rank, VERDICT_CHECKSUM)]:
                    self._heard[rank] = count
                    found.append(text)
        return found

    def leave(self) -> None:
        """Answer no more."""
        self._words[self._word(self.mine, LEFT)] = 1


def open_board(local: "Communicator") -> ShmMailbox | None:
    """Return the board of a host's ranks, None on all of them where they share no memory. Collective."""
    wanted = all(local.all_gather_object(config.shared_memory()))
    segment = open_segment(local, SHARE_BYTES) if wanted else None
    return None if segment is None else ShmMailbox(segment, local.rank, local.size)


def private_board() -> ShmMailbox:
    """Return the board of a rank that shares memory with nobody."""
    return ShmMailbox(Segment(-1, -(-SHARE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE, 1), 0, 1)
