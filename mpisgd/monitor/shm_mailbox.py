"""`ShmMailbox`: questions and answers among the ranks of a host, in shared memory.

Each rank has a page of words and room for an answer. Who asks writes the time into the word ASKED of those it
asks, and wakes them; an answer carries the time at which it was begun, and answers what was asked before. It
is for everyone, so any number of ranks may ask at once and need not know of each other. `MpiMailbox` has the
same methods: any thread may ask; one thread alone, the monitor's, reads questions and notices, and answers.
"""

import mmap
import time
import zlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from mpisgd import config
from mpisgd.transport.ipc.futex import Futex
from mpisgd.transport.ipc.segment import PAGE, Segment, open_segment

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["ShmMailbox", "open_shm_mailbox", "private_mailbox"]

ANSWER_BYTES = 2**18  # what is not written to takes no room
NOTICE_BYTES = 2**16
SHARE_BYTES = PAGE + ANSWER_BYTES + NOTICE_BYTES
# Words of a rank, in two cache lines: what others write, and what it writes itself; then the last stalls that
# it has reported to its user, and how many there were.
ASKED, ANSWERED, LENGTH, LEFT, NUM_REPORTED, REPORTED = 0, 8, 9, 11, 12, 64
MAX_REPORTED = 64
# How many notices it has given, and the length of the last, which its checksum follows.
NUM_NOTICES, NOTICE_LENGTH = 32, 33
POLL_S = 0.2  # where nobody can be woken


class ShmMailbox:
    """The questions, answers and notices of one rank to and from others of its host.

    Args:
        segment: SHARE_BYTES for each rank.
        ranks: the global ranks of the segment, in its order.
        rank: this one's.
    """

    def __init__(self, segment: Segment, ranks: Sequence[int], rank: int) -> None:
        self.ranks = tuple(ranks)
        self._rank = rank
        self._places = {each: place for place, each in enumerate(self.ranks)}
        self._segment = segment  # keeps the memory
        self._bytes = memoryview(segment.memory)
        self._words = self._bytes.cast("Q")
        self._futex = Futex(segment)
        self._answered = 0  # the stamp of the last question that was
        self._num_read: dict[int, int] = {}  # by rank, how many of its notices

    def _word(self, rank: int, which: int) -> int:
        return self._places[rank] * (SHARE_BYTES // 8) + which

    def _room(self, rank: int) -> int:
        return self._places[rank] * SHARE_BYTES + PAGE

    def _write(self, start: int, length: int, text: bytes) -> None:
        """Write a text of this rank; `length` is the word of its length, which its checksum follows."""
        length = self._word(self._rank, length)
        self._words[length + 1] = 2**32  # no text has this checksum: what is read meanwhile does not count
        self._bytes[start : start + len(text)] = text
        self._words[length] = len(text)
        self._words[length + 1] = zlib.crc32(text)

    def _read(self, rank: int, start: int, length: int) -> bytes | None:
        """Return a text of a rank; None while it is writing the next one: the caller tries again then."""
        length = self._word(rank, length)
        text = bytes(self._bytes[start : start + self._words[length]])
        return text if zlib.crc32(text) == self._words[length + 1] else None

    # -- asking ----------------------------------------------------------------------------------------

    def ask(self, ranks: Collection[int]) -> int:
        """Ask some ranks of the segment; return the stamp from which on their answers count."""
        stamp = time.monotonic_ns()
        for rank in ranks:
            word = self._word(rank, ASKED)
            self._words[word] = max(stamp, self._words[word])
            self._futex.wake(word)
        return stamp

    def answer_from(self, rank: int, number: int) -> bytes | None:
        """Return the answer of a rank to what was asked at the stamp `number`, None while there is none."""
        if self._words[self._word(rank, ANSWERED)] < number:
            return None
        return self._read(rank, self._room(rank), LENGTH)

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has said that it will answer no more."""
        return self._words[self._word(rank, LEFT)] != 0

    # -- answering -------------------------------------------------------------------------------------

    def asked(self) -> int:
        """Return the stamp of the last question to this rank; what `sleep` compares."""
        return self._words[self._word(self._rank, ASKED)]

    def questions(self) -> list[int]:
        """Return one stamp for all questions that were asked before now, if there are any.

        It is the time now, not the word ASKED: of two ranks that ask at once, one may write its older
        stamp over the other's. That question was asked before now, too.
        """
        if self.asked() <= self._answered:
            return []
        self._answered = max(self.asked(), time.monotonic_ns())
        return [self._answered]

    def sleep(self, asked: int, limit_s: float) -> None:
        """Sleep until somebody asks, not at all if somebody has since `asked`."""
        if self._futex.available:
            self._futex.wait(self._word(self._rank, ASKED), asked, limit_s)
        elif self.asked() == asked:
            time.sleep(min(limit_s, POLL_S))

    def wake(self) -> None:
        """Wake this rank's own thread."""
        self.ask([self._rank])

    def answer(self, stamp: int, text: bytes) -> None:
        """Put down the answer, of ANSWER_BYTES at most, to all that was asked up to the stamp."""
        self._write(self._room(self._rank), LENGTH, text)
        self._words[self._word(self._rank, ANSWERED)] = stamp

    # -- stalls that were reported; see `mpisgd.monitor.reporter` ---------------------------------------

    def note_reported(self, key: int) -> None:
        """Note that this rank has reported a stall to its user."""
        count = self._word(self._rank, NUM_REPORTED)
        self._words[self._word(self._rank, REPORTED) + self._words[count] % MAX_REPORTED] = key
        self._words[count] += 1

    def is_reported(self, key: int) -> bool:
        """Return whether a rank of this host has reported a stall."""
        starts = [self._word(rank, REPORTED) for rank in self.ranks]
        return any(key in self._words[start : start + MAX_REPORTED] for start in starts)

    def reported(self) -> list[int]:
        """Return what this rank has reported."""
        start = self._word(self._rank, REPORTED)
        return [key for key in self._words[start : start + MAX_REPORTED] if key]

    # -- notices ---------------------------------------------------------------------------------------

    def notify(self, text: bytes, ranks: Collection[int]) -> None:
        """Put a text where all ranks of the segment find it, and wake some.

        One longer than NOTICE_BYTES has no room here: the others' waits end at their timeouts then.
        """
        here = [rank for rank in ranks if rank in self._places]
        if len(text) > NOTICE_BYTES or not here:
            return
        self._write(self._room(self._rank) + ANSWER_BYTES, NOTICE_LENGTH, text)
        self._words[self._word(self._rank, NUM_NOTICES)] += 1
        self.ask(here)

    def notices(self) -> list[bytes]:
        """Return what others have let this rank know since this was last called."""
        found = []
        for rank in self.ranks:
            count = self._words[self._word(rank, NUM_NOTICES)]
            if count != self._num_read.get(rank, 0) and rank != self._rank:
                text = self._read(rank, self._room(rank) + ANSWER_BYTES, NOTICE_LENGTH)
                if text is not None:
                    self._num_read[rank] = count
                    found.append(text)
        return found

    def close(self) -> None:
        """Let the others know that this rank will answer no more."""
        self._words[self._word(self._rank, LEFT)] = 1
        self.wake()


def open_shm_mailbox(local: "Communicator", ranks: Sequence[int]) -> ShmMailbox | None:
    """Return the mailbox of a host's `ranks`, None on all of them where they share no memory. Collective."""
    wanted = all(local.all_gather_object(config.shared_memory()))
    segment = open_segment(local, SHARE_BYTES) if wanted and local.size > 1 else None
    return None if segment is None else ShmMailbox(segment, ranks, ranks[local.rank])


def private_mailbox(rank: int) -> ShmMailbox:
    """Return the mailbox of a rank that shares memory with nobody."""
    segment = Segment(-1, -(-SHARE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE, 1)
    return ShmMailbox(segment, (rank,), rank)
