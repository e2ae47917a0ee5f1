"""`MpiMailbox`: questions and answers between hosts, by messages on a communicator of their own."""

import json
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mpisgd.errors import MpisgdError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.transport.mpi import Communicator

__all__ = ["MpiMailbox", "Question"]

QUESTION, ANSWER, NOTICE = 1, 2, 3
HEADER_BYTES = 8  # of an answer: the question's number


class Question(NamedTuple):
    """What another rank asks.

    Attributes:
        number: what the answer is to carry.
        src: the rank that asks.
        deep: whether the stacks of processes that do not answer are wanted; see `StateCollector.collect`.
    """

    number: int
    src: int
    deep: bool


class _Receive(NamedTuple):
    """A message that is being received."""

    request: "MPI.Request"
    memory: Tensor
    src: int
    tag: int


class MpiMailbox:
    """The questions, answers and notices of one rank to and from other hosts.

    Args:
        communicator: a communicator of its own over all ranks.
        ranks: the global ranks of other hosts.
    """

    def __init__(self, communicator: "Communicator", ranks: Collection[int]) -> None:
        self.ranks = frozenset(ranks)
        self._communicator = communicator
        self._number = 0
        self._answers: dict[int, dict[int, bytes]] = {}  # by question that is not forgotten, by rank
        self._questions: list[Question] = []
        self._notices: list[bytes] = []
        self._receives: list[_Receive] = []
        self._sends: list[tuple[MPI.Request, Tensor]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, ranks: Sequence[int], *, deep: bool = False) -> int:
        """Ask some ranks; return the number of the question."""
        with self._lock:
            self._number += 1
            number = self._number
            self._answers[number] = {}
        for rank in ranks:
            self._send(json.dumps([number, deep]).encode(), rank, QUESTION)
        return number

    def answer_from(self, rank: int, number: int) -> bytes | None:
        """Return what a rank has answered to a question, None while there is nothing."""
        with self._lock:
            return self._answers.get(number, {}).get(rank)

    def forget(self, number: int) -> None:
        """Drop the answers to a question, those that come later, too."""
        with self._lock:
            self._answers.pop(number, None)

    def questions(self) -> list[Question]:
        """Take in what has come; return the questions in it."""
        with self._lock:
            self._guarded(self._receive)
            questions, self._questions = self._questions, []
            return questions

    def answer(self, question: Question, text: bytes) -> None:
        """Answer a question."""
        self._send(question.number.to_bytes(HEADER_BYTES, "little") + text, question.src, ANSWER)

    def notify(self, text: bytes, ranks: Collection[int]) -> None:
        """Send a notice."""
        for rank in self.ranks.intersection(ranks):
            self._send(text, rank, NOTICE)

    def notices(self) -> list[bytes]:
        """Return the notices that came with the questions since this was last called."""
        with self._lock:
            notices, self._notices = self._notices, []
            return notices

    @property
    def is_busy(self) -> bool:
        """Return whether a message is half here, or answers are awaited: whether to poll often."""
        return bool(self._receives or self._answers)

    def _send(self, text: bytes, dst: int, tag: int) -> None:
        memory = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        with self._lock:
            self._guarded(lambda: self._sends.append((self._communicator.isend(memory, dst, tag), memory)))

    def _guarded(self, act: Callable[[], None]) -> None:
        """Where MPI refuses (a rank is lost), nothing can be asked any more; whoever waits for it learns."""
        if not self._is_closed:
            try:
                act()
            except MpisgdError:
                self._is_closed = True

    def _receive(self) -> None:
        self._sends = [each for each in self._sends if not self._communicator.poll([each[0]])]
        while (found := self._communicator.probe()) is not None:
            src, tag, nbytes = found
            memory = torch.empty(nbytes, dtype=torch.uint8)
            self._receives.append(_Receive(self._communicator.irecv(memory, src, tag), memory, src, tag))
        receives, self._receives = self._receives, []
        for each in receives:
            if self._communicator.poll([each.request]):
                self._sort(each.memory.numpy().tobytes(), each.src, each.tag)
            else:
                self._receives.append(each)

    def _sort(self, text: bytes, src: int, tag: int) -> None:
        """Put what has come where it belongs."""
        if tag == QUESTION:
            number, deep = json.loads(text)
            self._questions.append(Question(number, src, deep))
        elif tag == NOTICE:
            self._notices.append(text)
        elif (answers := self._answers.get(int.from_bytes(text[:HEADER_BYTES], "little"))) is not None:
            answers[src] = text[HEADER_BYTES:]

    def close(self) -> None:
        """Neither ask nor answer any more, whatever a thread that is late still wants."""
        with self._lock:
            self._is_closed = True
