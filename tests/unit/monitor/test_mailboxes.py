"""Questions, answers and notices, the same in shared memory and by messages, which a stand-in plays."""

from __future__ import annotations

import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest

from mpisgd.monitor.mailbox_pages import ANSWER, ASKED, NOTICE, NOTICE_BYTES, SHARE_BYTES
from mpisgd.monitor.mpi_mailbox import MpiMailbox, Question
from mpisgd.monitor.shm_mailbox import ShmMailbox, open_shm_mailbox
from mpisgd.transport.ipc.segment import Segment


class Network:
    """The messages that are under way, by receiver."""

    def __init__(self) -> None:
        self.inboxes: dict[int, list[tuple[int, int, bytes]]] = defaultdict(list)


class FakeCommunicator:
    """A communicator of one rank on which every message arrives at once."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.rank = network, rank

    def isend(self, memory, dst, tag=0) -> None:
        self.network.inboxes[dst].append((self.rank, tag, memory.numpy().tobytes()))

    def poll(self, requests) -> bool:
        return True

    def probe(self) -> tuple[int, int, int] | None:
        inbox = self.network.inboxes[self.rank]
        return (inbox[0][0], inbox[0][1], len(inbox[0][2])) if inbox else None

    def irecv(self, memory, src, tag) -> None:
        memory.numpy()[:] = list(self.network.inboxes[self.rank].pop(0)[2])


def shm_mailboxes(size: int) -> list[ShmMailbox]:
    segment = Segment(-1, SHARE_BYTES, size)
    return [ShmMailbox(segment, range(size), rank) for rank in range(size)]


def mpi_mailboxes(size: int) -> list[MpiMailbox]:
    """Every rank on a host of its own."""
    network = Network()
    return [MpiMailbox(FakeCommunicator(network, rank), set(range(size)) - {rank}) for rank in range(size)]


@pytest.fixture(params=[shm_mailboxes, mpi_mailboxes], ids=["memory", "messages"])
def mailboxes(request) -> list[ShmMailbox] | list[MpiMailbox]:
    return request.param(3)


def reply(mailbox: ShmMailbox | MpiMailbox, text: bytes) -> None:
    """Answer the one question that has come."""
    (question,) = mailbox.questions()
    mailbox.answer(question, text)
    assert mailbox.questions() == []


def take_in(mailbox: ShmMailbox | MpiMailbox) -> None:
    """Do what the monitor's thread does: what has come between hosts comes in when it asks."""
    assert mailbox.questions() == []


def test_an_answer_counts_for_what_was_asked_before_it(mailboxes):
    mine, other, _ = mailboxes
    before = mine.ask([1])
    assert mine.answer_from(1, before) is None
    reply(other, b"all is well")
    take_in(mine)
    assert mine.answer_from(1, before) == b"all is well"
    later = mine.ask([1])
    assert mine.answer_from(1, later) is None
    reply(other, b"not any more")
    take_in(mine)
    assert mine.answer_from(1, later) == b"not any more"


def test_several_are_asked_and_each_answers_for_itself(mailboxes):
    mine, second, third = mailboxes
    number = mine.ask([1, 2])
    reply(second, b"second")
    reply(third, b"third")
    take_in(mine)
    assert [mine.answer_from(rank, number) for rank in (1, 2)] == [b"second", b"third"]


def test_a_notice_comes_once_to_those_it_is_for(mailboxes):
    mine, other, _ = mailboxes
    mine.notify(b"nothing can go on", [1])
    take_in(mine)
    other.questions()  # one may stand for the waking
    assert other.notices() == [b"nothing can go on"]
    assert other.notices() == []
    assert mine.notices() == []


# -- shared memory --------------------------------------------------------------------------------------


def test_of_two_that_ask_at_once_both_are_answered(monkeypatch):
    """The first has read the word ASKED before the second writes there, and writes over its stamp."""
    first, second, other = shm_mailboxes(3)
    now = iter([100, 105])
    with monkeypatch.context() as patch:
        patch.setattr("time.monotonic_ns", lambda: next(now))
        early, late = first.ask([2]), second.ask([2])
    first._words[2][ASKED] = early
    assert other.asked() == early < late
    reply(other, b"all is well")
    assert first.answer_from(2, early) == second.answer_from(2, late) == b"all is well"


def test_an_answer_that_is_half_written_is_not_taken():
    mine, other = shm_mailboxes(2)
    stamp = mine.ask([1])
    other.answer(stamp, b"x" * 100)
    other._bytes[1][ANSWER.start] = ord("y")
    assert mine.answer_from(1, stamp) is None


def test_who_sleeps_is_woken_by_a_question():
    mine, other = shm_mailboxes(2)
    asked, woken = other.asked(), threading.Event()

    def sleep() -> None:
        while other.asked() == asked:
            other.sleep(asked, 20.0)
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    mine.ask([1])
    assert woken.wait(5.0)
    thread.join()


def test_what_one_has_reported_all_know_the_last_of_it_at_least():
    first, second = shm_mailboxes(2)
    for key in range(1, 101):
        first.note_reported(key)
    assert second.is_reported(100)
    assert second.is_reported(50)
    assert not second.is_reported(101)
    assert second.reported() == []
    assert 100 in first.reported()
    first.close()
    assert second.has_left(0)
    assert not second.has_left(1)


def test_a_notice_is_read_only_as_a_whole():
    mine, other = shm_mailboxes(2)
    other.notify(b"x" * 100, [0])
    other._bytes[1][NOTICE.start] = ord("y")  # the next one is being written
    assert mine.notices() == []
    other._bytes[1][NOTICE.start] = ord("x")
    assert mine.notices() == [b"x" * 100]


def test_a_notice_that_is_too_long_leaves_the_others_memory_alone():
    mine, other = shm_mailboxes(2)
    mine.notify(b"x" * (NOTICE_BYTES + 1), [1])
    assert other.notices() == []
    mine.notify(b"x" * NOTICE_BYTES, [1])
    assert other.notices() == [b"x" * NOTICE_BYTES]
    assert not other.has_left(1)


def test_a_rank_that_shares_no_memory_has_a_mailbox_of_its_own():
    alone = open_shm_mailbox(SimpleNamespace(rank=0, size=1, all_gather_object=lambda value: [value]), [7])
    alone.note_reported(3)
    assert alone.is_reported(3)
    alone.notify(b"for another host", [1])
    assert alone.notices() == []


# -- messages -------------------------------------------------------------------------------------------


def test_an_answer_that_comes_late_is_dropped():
    """Three ranks of a host are asked and one answer is enough: those of the others once stayed for ever."""
    mine, second, third = mpi_mailboxes(3)
    number = mine.ask([1, 2], deep=True)
    reply(second, b"second")
    take_in(mine)
    assert mine.answer_from(1, number) == b"second"
    mine.forget(number)
    reply(third, b"third")
    take_in(mine)
    assert mine.answer_from(2, number) is None
    assert not mine._answers


def test_questions_are_forgotten_while_answers_come_in():
    """Any thread may ask while the monitor's takes in what comes: a dictionary once changed meanwhile."""
    mine, other = mpi_mailboxes(2)
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            for question in other.questions():
                other.answer(question, b"here")
            mine.questions()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        for _ in range(300):
            number = mine.ask([1])
            mine.answer_from(1, number)
            mine.forget(number)
    finally:
        over.set()
        thread.join()
    assert not mine._answers


def test_a_question_says_who_asks_and_how_thoroughly():
    mine, other = mpi_mailboxes(2)
    number = mine.ask([1], deep=True)
    assert other.questions() == [Question(number, 0, True)]


class Freed:
    """A communicator that has been freed: MPI ends the job of whoever uses it."""

    rank = 0

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} of a communicator that is no more")


def test_a_thread_that_is_late_leaves_a_closed_mailbox_alone():
    mailbox = MpiMailbox(Freed(), [1, 2, 3])
    mailbox.close()
    assert mailbox.questions() == []
    mailbox.notify(b"nothing can go on", [1])
    assert mailbox.ask([1, 2, 3]) == 1  # numbered as ever, sent to nobody
