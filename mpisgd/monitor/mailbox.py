"""`Mailbox`: how ranks ask each other for their states, outside the order of operations."""

from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

__all__ = ["Mailbox", "Question"]


class Question(NamedTuple):
    """What another rank asks.

    Attributes:
        number: what the answer is to carry.
        src: the rank that asks; -1: any number of ranks of this host, who all read the answer.
        deep: whether the stacks of processes that do not answer are wanted; see `StateCollector.collect`.
    """

    number: int
    src: int = -1
    deep: bool = False


class Mailbox(Protocol):
    """Questions, answers and notices between this rank and some others; ranks are global ranks.

    Any thread may ask. One thread alone, the monitor's, reads questions and notices, and answers.

    Attributes:
        max_bytes: of an answer; None: any number.
    """

    max_bytes: int | None

    def ask(self, ranks: Sequence[int], *, deep: bool) -> int:
        """Ask some ranks that this mailbox reaches; return the question's number."""

    def answer_from(self, rank: int, number: int) -> bytes | None:
        """Return what a rank has answered to a question, None while there is nothing."""

    def forget(self, number: int) -> None:
        """Take no more answers to a question."""

    def questions(self) -> list[Question]:
        """Return what this rank has been asked since this was last called."""

    def answer(self, question: Question, text: bytes) -> None:
        """Answer a question."""

    def notify(self, text: bytes, ranks: Collection[int]) -> None:
        """Let some ranks, of those that this mailbox reaches, know of a deadlock."""

    def notices(self) -> list[bytes]:
        """Return what others have let this rank know since this was last called."""

    def close(self) -> None:
        """Neither ask nor answer any more."""
