"""`MpiMailbox`: questions and answers between hosts, by messages on a communicator of their own."""

import pickle
import threading
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.errors import MpisgdError
from mpisgd.interfaces.communicator import GroupCommunicator, Request

__all__ = ["MpiMailbox", "Question"]


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


class Answer(NamedTuple):
    """What a rank answers to the question `number`."""

    number: int
    src: int
    text: bytes


class MpiMailbox:
    """The questions, answers and notices of one rank to and from other hosts.

    Args:
        communicator: a communicator of its own over all ranks.
        ranks: the global ranks of other hosts.
    """

    def __init__(self, communicator: GroupCommunicator, ranks: Collection[int]) -> None:
        self._ranks = frozenset(ranks)
        self._communicator = communicator
        self._number = 0
        self._answers: dict[int, dict[int, bytes]] = {}  # by question that is not forgotten, by rank
        self._questions: list[Question] = []
        self._notices: list[bytes] = []
        self._receives: list[tuple[Request, Tensor]] = []
        self._sends: list[tuple[Request, Tensor]] = []
        self._lock = threading.Lock()
        self._is_closed = False

    def ask(self, ranks: Sequence[int], *, deep: bool = False) -> int:
        """Ask some ranks; return the number of the question."""
        with self._lock:
            self._number += 1
            question = Question(self._number, self._communicator.rank, deep)
            self._answers[question.number] = {}
        self._send(question, ranks)
        return question.number

    def answer_from(self, rank: int, number: int) -> bytes | None:
        """Return a rank's answer to a question, None until it has come."""
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
        self._send(Answer(question.number, self._communicator.rank, text), [question.src])

    def notify(self, text: bytes, ranks: Collection[int]) -> None:
        """Send a notice."""
        self._send(text, self._ranks.intersection(ranks))

    def notices(self) -> list[bytes]:
        """Return the notices that came with the questions since this was last called."""
        with self._lock:
            notices, self._notices = self._notices, []
            return notices

    @property
    def is_busy(self) -> bool:
        """Return whether a message is half here, or answers are awaited: whether to poll often."""
        return bool(self._receives or self._answers)

    def _send(self, message: Question | Answer | bytes, ranks: Collection[int]) -> None:
        memory = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)

        def start() -> None:
            for rank in ranks:
                self._sends.append((self._communicator.isend(memory, rank), memory))

        with self._lock:
            self._guarded(start)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Where MPI refuses (a rank is lost), nothing can be asked any more; whoever waits for it learns."""
        if not self._is_closed:
            try:
                act()
            except MpisgdError:
                self._is_closed = True
                pending = self._receives + self._sends  # MPI may still write to their memory
                self._communicator.abandon([request for request, _ in pending], pending)

    def _receive(self) -> None:
        self._sends = [each for each in self._sends if not self._communicator.poll([each[0]])]
        while (found := self._communicator.probe()) is not None:
            src, tag, nbytes = found
            memory = torch.empty(nbytes, dtype=torch.uint8)
            self._receives.append((self._communicator.irecv(memory, src, tag), memory))
        pending = []
        for request, memory in self._receives:
            if self._communicator.poll([request]):
                self._sort(pickle.loads(memory.numpy().tobytes()))
            else:
                pending.append((request, memory))
        self._receives = pending  # only now: where MPI refuses midway, all of them are kept

    def _sort(self, message: Question | Answer | bytes) -> None:
        """Put what has come where it belongs."""
        if isinstance(message, Question):
            self._questions.append(message)
        elif isinstance(message, bytes):
            self._notices.append(message)
        elif message.number in self._answers:
            self._answers[message.number][message.src] = message.text

    def close(self) -> None:
        """Neither ask nor answer any more, whatever a thread that is late still wants."""
        with self._lock:
            self._is_closed = True
