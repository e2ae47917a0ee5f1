"""`MpiMailbox`: question and answer between hosts, by messages on a communicator of their own.

A question goes to a few ranks of every other host at once, since one of them may be stopped; each gathers
the views of its host's ranks and sends them all.
"""

import json
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mpisgd.errors import MpisgdError
from mpisgd.monitor.rank_state import RankState, decode, encode

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.transport.mpi import Communicator

__all__ = ["MpiMailbox", "Question"]

QUESTION, ANSWER, VERDICT = 1, 2, 3
ASKED_PER_HOST = 3


class Question(NamedTuple):
    """What another host wants to know: the sender's rank, its number for the question, and how thoroughly."""

    src: int
    number: int
    deep: bool


class _Coming(NamedTuple):
    """A message that is being received."""

    request: "MPI.Request"
    memory: Tensor
    src: int
    tag: int


class MpiMailbox:
    """The messages of one rank. Any thread may ask; one thread alone calls `look`.

    Args:
        wire: a communicator of its own over all ranks.

    Attributes:
        answers: what came, by (number of the question, rank that sent it).
        verdicts: those that came; see `mpisgd.monitor.deadlock_detector`.
    """

    def __init__(self, wire: "Communicator") -> None:
        self.answers: dict[tuple[int, int], list[RankState]] = {}
        self.verdicts: list[bytes] = []
        self._wire = wire
        self._number = 0
        self._coming: list[_Coming] = []
        self._sent: list[tuple[MPI.Request, Tensor]] = []
        self._lock = threading.Lock()
        self._deaf = False

    def ask(self, hosts: Sequence[Sequence[int]], *, deep: bool) -> int:
        """Ask the ranks of some hosts; return the number of the question."""
        with self._lock:
            self._number += 1
            number = self._number
        for ranks in hosts:
            for rank in ranks[:ASKED_PER_HOST]:
                self._send(json.dumps([number, deep]).encode(), rank, QUESTION)
        return number

    def give(self, question: Question, views: Sequence[RankState]) -> None:
        """Answer a question."""
        text = json.dumps([question.number, [encode(view).decode() for view in views]])
        self._send(text.encode(), question.src, ANSWER)

    def give_verdict(self, text: bytes, ranks: Sequence[int]) -> None:
        """Send a verdict."""
        for rank in ranks:
            self._send(text, rank, VERDICT)

    def _send(self, text: bytes, dst: int, tag: int) -> None:
        memory = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        with self._lock:
            self._guarded(lambda: self._sent.append((self._wire.isend(memory, dst, tag), memory)))

    def look(self) -> list[Question]:
        """Take in what has come; return the questions in it."""
        questions: list[Question] = []
        with self._lock:
            self._guarded(lambda: self._take_in(questions))
        return questions

    @property
    def is_busy(self) -> bool:
        """Return whether a message is half here."""
        return bool(self._coming)

    def _guarded(self, act: Callable[[], None]) -> None:
        """Where MPI refuses (a rank is lost), nothing can be asked any more; whoever waits for it learns."""
        if not self._deaf:
            try:
                act()
            except MpisgdError:
                self._deaf = True

    def _take_in(self, questions: list[Question]) -> None:
        self._sent = [each for each in self._sent if not self._wire.poll([each[0]])]
        while (found := self._wire.probe()) is not None:
            src, tag, nbytes = found
            memory = torch.empty(nbytes, dtype=torch.uint8)
            self._coming.append(_Coming(self._wire.irecv(memory, src, tag), memory, src, tag))
        coming, self._coming = self._coming, []
        for each in coming:
            if not self._wire.poll([each.request]):
                self._coming.append(each)
            elif each.tag == QUESTION:
                questions.append(Question(each.src, *json.loads(each.memory.numpy().tobytes())))
            elif each.tag == VERDICT:
                self.verdicts.append(each.memory.numpy().tobytes())
            else:
                number, texts = json.loads(each.memory.numpy().tobytes())
                self.answers[number, each.src] = [decode(text) for text in texts]

    def drop(self, number: int) -> None:
        """Forget the answers to a question."""
        for key in [key for key in self.answers if key[0] == number]:
            self.answers.pop(key, None)

    def close(self) -> None:
        """Neither ask nor answer any more, whatever a thread that is late still wants."""
        with self._lock:
            self._deaf = True
