"""`MailboxPages`: the mailboxes of a host's ranks, as who asks sees them: another rank, or another process.

A file without a name that the ranks share (see `mpisgd.transport.ipc.memfd`). Each has a page of words, room
for an answer and room for a notice. Other processes of the same user find it through /proc
(`mpisgd.tools.cli.job_finder`); nothing here loads torch, for which they would wait.
"""

import mmap
import time
import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple

from mpisgd.monitor.process_inspector import ProcessIdentity
from mpisgd.monitor.rank_state import RankState, Wait
from mpisgd.transport.ipc.futex import Futex

__all__ = [
    "ANSWER",
    "ANSWER_BYTES",
    "ASKED",
    "FORMAT",
    "INTRODUCTION",
    "LEFT",
    "MAILBOX_NAME",
    "NOTICE",
    "NOTICE_BYTES",
    "NUM_REPORTED",
    "REPORTED",
    "SHARE_BYTES",
    "WORD_BYTES",
    "Introduction",
    "MailboxPages",
    "Meters",
    "Slot",
    "Steps",
]


# A rank stands whose last step ended so long ago, in steps of the mean length and in seconds.
STANDS_STEPS, STANDS_S = 10, 2.0


class Slot(NamedTuple):
    """Room for one text of a rank: where it lies, and the first of its words: stamp, length, checksum."""

    start: int
    word: int


MAILBOX_NAME = "mpisgd-mailbox"  # what /proc calls the file
PAGE = mmap.PAGESIZE
WORD_BYTES = 8
ANSWER_BYTES = 2**18  # what is not written to takes no room
NOTICE_BYTES = 2**16
SHARE_BYTES = PAGE + ANSWER_BYTES + NOTICE_BYTES
# Words of a rank, in cache lines of their own: what others write, and what it writes itself; then who it is,
# its training steps, its metrics, and the last stalls that it has reported, and how many there were.
ASKED, LEFT, NUM_REPORTED, INTRODUCTION, STEPS, METERS, REPORTED = 0, 11, 12, 40, 48, 51, 64
ANSWER, NOTICE = Slot(PAGE, 8), Slot(PAGE + ANSWER_BYTES, 32)
# What both sides must agree on: the places above, and what a state consists of.
FORMAT = zlib.crc32(
    repr(
        (ANSWER, NOTICE, STEPS, METERS, [*RankState.__dataclass_fields__, *Wait.__dataclass_fields__])
    ).encode()
)


class Introduction(NamedTuple):
    """Who has a mailbox, for those who are no rank.

    Attributes:
        rank: global rank.
        size: of the job.
        job: a number that all ranks of the job share.
        process: where it is.
        is_answering: whether it has a thread that answers.
    """

    rank: int
    size: int
    job: int
    process: ProcessIdentity
    is_answering: bool


class Steps(NamedTuple):
    """The training steps of a rank: the words of `mpisgd.monitor.step_counter`."""

    number: int
    last_ns: int
    mean_ns: int

    def per_s(self, now_ns: int) -> float | None:
        """Return the rate: 0 where the last step ended long ago, None before there is one."""
        if not self.mean_ns:
            return None
        stands_s = max(STANDS_S, STANDS_STEPS * self.mean_ns / 1e9)
        return 0.0 if (now_ns - self.last_ns) / 1e9 > stands_s else 1e9 / self.mean_ns


class Meters(NamedTuple):
    """What a rank has added up since `mpisgd.metrics.start`: all 0 where it was not called.

    Attributes:
        num_steps: training steps, of all optimizers.
        computation_ns: the program did not wait; see `mpisgd.timeline.accounts` for this and the next four.
        communication_ns: it waited while data moved.
        wait_ns: it waited for other ranks.
        other_ns: it waited for something else.
        hidden_ns: data moved while it computed.
        to_host_bytes: of messages that MPI was given for ranks of this host.
        to_others_bytes: of those for ranks of other hosts.
        shared_bytes: of tensors that moved through the memory of the host.
        attached_bytes: of those that moved by cross-memory attach.
        collective_bytes: of those that MPI's own collectives moved.
    """

    num_steps: int = 0
    computation_ns: int = 0
    communication_ns: int = 0
    wait_ns: int = 0
    other_ns: int = 0
    hidden_ns: int = 0
    to_host_bytes: int = 0
    to_others_bytes: int = 0
    shared_bytes: int = 0
    attached_bytes: int = 0
    collective_bytes: int = 0


class MailboxPages:
    """What who asks sees of the mailboxes of a host's ranks.

    Args:
        memory: SHARE_BYTES for each rank.
        ranks: what is asked for them by, in the memory's order.

    Attributes:
        ranks: as given.
    """

    def __init__(self, memory: mmap.mmap, ranks: Sequence[int]) -> None:
        self.ranks = tuple(ranks)
        view = memoryview(memory)
        self._bytes = {rank: view[i * SHARE_BYTES : (i + 1) * SHARE_BYTES] for i, rank in enumerate(ranks)}
        self._words = {rank: share.cast("Q") for rank, share in self._bytes.items()}
        self._futex = Futex(memory)
        self._asked_words = {rank: i * SHARE_BYTES // WORD_BYTES + ASKED for i, rank in enumerate(ranks)}

    def ask(self, ranks: Collection[int]) -> int:
        """Ask some ranks of the segment; return the stamp from which on their answers count."""
        stamp = time.monotonic_ns()
        for rank in ranks:
            self._words[rank][ASKED] = max(stamp, self._words[rank][ASKED])
            self._futex.wake(self._asked_words[rank])
        return stamp

    def answer_from(self, rank: int, number: int) -> bytes | None:
        """Return the answer of a rank to what was asked at the stamp `number`, None while there is none."""
        return self._read(ANSWER, rank) if self._words[rank][ANSWER.word] >= number else None

    def _read(self, slot: Slot, rank: int) -> bytes | None:
        """Return a text of a rank; None while it is writing the next one: the caller tries again then."""
        _, length, checksum = self._words[rank][slot.word : slot.word + 3]
        text = bytes(self._bytes[rank][slot.start : slot.start + length])
        return text if zlib.crc32(text) == checksum else None

    def has_left(self, rank: int) -> bool:
        """Return whether a rank has said that it will answer no more."""
        return self._words[rank][LEFT] != 0

    def introduction(self, rank: int) -> Introduction | None:
        """Return who has a mailbox; None where nobody has said so, or another version of mpisgd has."""
        form, global_rank, size, job, pid, began, answers, *_ = self._words[rank][INTRODUCTION:STEPS]
        if form != FORMAT:
            return None
        return Introduction(global_rank, size, job, ProcessIdentity(pid, began, -1), bool(answers))

    def steps(self, rank: int) -> Steps:
        """Return how far a rank's program is, which need not answer for this."""
        return Steps(*self.step_words(rank))

    def step_words(self, rank: int) -> memoryview:
        """Return the words in which a rank counts its steps."""
        return self._words[rank][STEPS : STEPS + len(Steps._fields)]

    def meters(self, rank: int) -> Meters:
        """Return the sums of a rank's metrics, which need not answer for this."""
        return Meters(*self.meter_words(rank))

    def meter_words(self, rank: int) -> memoryview:
        """Return the words in which a rank adds up what its metrics are."""
        return self._words[rank][METERS : METERS + len(Meters._fields)]
