"""`ShmMailbox`: questions and answers among the ranks of a host, in shared memory.

Each rank has a page of words and room for an answer. Who asks writes the time into the word ASKED of those it
asks, and wakes them; an answer carries the time at which it was begun, and answers what was asked before. It
is for everyone, so any number of ranks may ask at once and need not know of each other. `MpiMailbox` has the
same methods: any thread may ask; one thread alone, the monitor's, reads questions and notices, and answers.
"""

import time
import zlib
from collections.abc import Collection, Sequence

from mpisgd import config
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.monitor.mailbox_pages import (
    ANSWER,
    ASKED,
    FORMAT,
    INTRODUCTION,
    LEFT,
    MAILBOX_NAME,
    NOTICE,
    NOTICE_BYTES,
    NUM_REPORTED,
    REPORTED,
    SHARE_BYTES,
    Introduction,
    MailboxPages,
    Slot,
)
from mpisgd.monitor.step_counter import counter
from mpisgd.standard_error import print_to_user
from mpisgd.transport.ipc.memfd import create
from mpisgd.transport.ipc.segment import Segment, open_segment

__all__ = ["ShmMailbox", "open_shm_mailbox"]

MAX_REPORTED = 64
POLL_S = 0.2  # where nobody can be woken


class ShmMailbox(MailboxPages):
    """The questions, answers and notices of one rank to and from others of its host.

    Args:
        segment: SHARE_BYTES for each rank.
        ranks: the global ranks of the segment, in its order.
        rank: this one's.
    """

    def __init__(self, segment: Segment, ranks: Sequence[int], rank: int) -> None:
        super().__init__(segment.memory, ranks)
        self._segment = segment
        self._rank = rank
        self._mine = self._words[rank]
        self._answered = 0  # the stamp of the last question that was
        self._read_notices: dict[int, int] = {}  # by rank, the stamp of the last one

    def introduce(self, me: Introduction) -> None:
        """Let other processes of this user know who this is, and see how far its program is."""
        counter.move_to(self.step_words(self._rank))
        words = [me.rank, me.size, me.job, me.process.pid, me.process.began, int(me.is_answering)]
        for i, word in enumerate(words, INTRODUCTION + 1):
            self._mine[i] = word
        self._mine[INTRODUCTION] = FORMAT

    def _write(self, slot: Slot, stamp: int, text: bytes) -> None:
        """Write a text of this rank."""
        word = slot.word
        self._mine[word + 2] = 2**32  # no text has this checksum: what is read meanwhile does not count
        self._bytes[self._rank][slot.start : slot.start + len(text)] = text
        self._mine[word + 1] = len(text)
        self._mine[word + 2] = zlib.crc32(text)
        self._mine[word] = stamp

    # -- answering -------------------------------------------------------------------------------------

    def asked(self) -> int:
        """Return the stamp of the last question to this rank; what `sleep` compares."""
        return self._mine[ASKED]

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
            self._futex.wait(self._asked_words[self._rank], asked, limit_s)
        elif self.asked() == asked:
            time.sleep(min(limit_s, POLL_S))

    def wake(self) -> None:
        """Wake this rank's own thread."""
        self.ask([self._rank])

    def answer(self, stamp: int, text: bytes) -> None:
        """Put down the answer, of ANSWER_BYTES at most, to all that was asked up to the stamp."""
        self._write(ANSWER, stamp, text)

    # -- stalls that were reported; see `mpisgd.monitor.watchdog` ---------------------------------------

    def note_reported(self, key: int) -> None:
        """Note that this rank has reported a stall to its user."""
        self._mine[REPORTED + self._mine[NUM_REPORTED] % MAX_REPORTED] = key
        self._mine[NUM_REPORTED] += 1

    def is_reported(self, key: int) -> bool:
        """Return whether a rank of this host has reported a stall."""
        return any(key in words[REPORTED : REPORTED + MAX_REPORTED] for words in self._words.values())

    def reported(self) -> list[int]:
        """Return the keys of the stalls that this rank has reported."""
        return [key for key in self._mine[REPORTED : REPORTED + MAX_REPORTED] if key]

    # -- notices ---------------------------------------------------------------------------------------

    def notify(self, text: bytes, ranks: Collection[int]) -> None:
        """Put a text where all ranks of the segment find it, and wake some.

        One longer than NOTICE_BYTES has no room here, which is said: waits end at their timeouts then.
        """
        here = [rank for rank in ranks if rank in self._words]
        if here and len(text) > NOTICE_BYTES:
            print_to_user(
                f"a notice of {len(text)} bytes to {len(here)} ranks is longer than its mailbox: waits "
                "that can never end do so at their timeouts"
            )
        elif here:
            self._write(NOTICE, time.monotonic_ns(), text)
            self.ask(here)

    def notices(self) -> list[bytes]:
        """Return the notices that other ranks have sent to this one since the last call."""
        found = []
        for rank, words in self._words.items():
            stamp = words[NOTICE.word]
            if rank != self._rank and stamp != self._read_notices.get(rank, 0):
                text = self._read(NOTICE, rank)
                if text is not None:
                    self._read_notices[rank] = stamp
                    found.append(text)
        return found

    def close(self) -> None:
        """Let the others know that this rank will answer no more."""
        self._mine[LEFT] = 1
        self.wake()
        self._segment.close_file()


def open_shm_mailbox(local: GroupCommunicator, ranks: Sequence[int]) -> ShmMailbox:
    """Return the mailbox of a host's `ranks`; where they share no memory, one of this rank alone. Collective.

    Args:
        local: the communicator of this host's ranks.
        ranks: what they are called in the job.
    """
    wanted = all(local.all_gather_object(config.shared_memory()))
    segment = open_segment(local, SHARE_BYTES, name=MAILBOX_NAME) if wanted and local.size > 1 else None
    if segment is None:
        alone = Segment(create(SHARE_BYTES, MAILBOX_NAME), SHARE_BYTES, 1)
        return ShmMailbox(alone, ranks[local.rank : local.rank + 1], ranks[local.rank])
    return ShmMailbox(segment, ranks, ranks[local.rank])
