"""`end_operations`: no rank leaves a group while another one is in the middle of an operation.

Ranks may end several groups at once, and others one of them: all are polled together, and none blocks in MPI.
"""

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.core.wait_registry import Message, WaitReason
from mpisgd.core.waiting import Backoff
from mpisgd.errors import CollectiveTimeout, MpisgdError

if TYPE_CHECKING:
    from mpisgd.transport.mpi import Communicator

__all__ = ["end_operations"]


def end_operations(groups: Sequence[Group], timeout_s: float) -> list[Group]:
    """Return when nothing is in flight any more, on any rank. Collective over all groups.

    Returns:
        The groups that can be closed: without those that another member has left.
    """
    for group in groups:
        group.queue.drain()
    ends = _agree_on_end([group for group in groups if group.queue.broken is None], timeout_s)
    for group in groups:
        if group.queue.broken is not None:  # MPI would wait for ever for what has failed
            raise group.queue.broken
    for end in ends:
        end.group.point_to_point.drain(end.everyones_messages())
    return [end.group for end in ends]


def _agree_on_end(groups: Sequence[Group], timeout_s: float) -> "list[_GroupEnd]":
    """Agree with all ranks, in all groups at once, that no operation follows.

    Returns:
        The ends of the groups that no member has left.
    """
    backoff = Backoff(timeout_s)
    ends = [_GroupEnd(group) for group in groups]
    backoff.wait_for(lambda: _is_settled(ends), about=lambda: _reason(groups))
    for end in sorted(ends, key=lambda end: not end.check.differs()):
        try:
            if not end.is_left():
                end.verify(backoff)
        except MpisgdError as exc:
            if not end.is_left():
                end.group.queue.broken = exc
                raise
    return [end for end in ends if not end.is_left()]


def _reason(groups: Sequence[Group]) -> WaitReason:
    """Tell the monitor that this rank is at the end of its program, or of one group."""
    group = groups[0]
    return WaitReason("shutdown", group.name, (), group.ranks, group.queue.consistency.number, group.ordinal)


def _is_settled(ends: "Sequence[_GroupEnd]") -> bool:
    """Poll all ends; return whether all are over, or one of them has found a rank at another operation.

    That rank waits there for this one to compare, and comes to no other group's end.
    """
    over = [end.advance() or end.is_left() for end in ends]
    return all(over) or any(end.check.differs() for end in ends)


class _GroupEnd:
    """The end of one group: all members come to it, then tell each other which messages are in flight."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.check = group.queue.consistency.begin(Operation("shutdown"), lambda: "the end of the program")
        self._exchange: _MessageExchange | None = None

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        if self._exchange is None and self.check.advance() and not self.check.differs():
            self._exchange = _MessageExchange(self.group)
        return self._exchange is not None and self._exchange.advance()

    def is_left(self) -> bool:
        """Return whether a member has left the group: it comes to no end, so none is complete there."""
        return self.group.queue.consistency.somebody_left()

    def verify(self, backoff: Backoff) -> None:
        """Raise unless all members have come to this end and told each other of their messages."""
        self.check.wait(backoff)
        self.check.verify()
        if not backoff.wait_for(self.advance):
            raise CollectiveTimeout(
                f"shutdown of group '{self.group.name}': waited {backoff.waited_s:.1f} s for a rank that has "
                "come to it, but has not told which of its messages are in flight"
            )

    def everyones_messages(self) -> list[list[Message]]:
        """Return by group rank which messages are in flight there; call it when this is over."""
        assert self._exchange is not None
        return self._exchange.received()


class _MessageExchange:
    """An all-gather of the messages in flight: of their lengths when pickled, then of the pickles."""

    def __init__(self, group: Group) -> None:
        self._communicator: Communicator = group.queue.communicator
        pickled = pickle.dumps(group.point_to_point.in_flight())
        self._mine = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
        self._length = torch.tensor([len(pickled)])
        self._lengths = torch.zeros(self._communicator.size, dtype=torch.int64)
        self._texts: torch.Tensor | None = None
        self._request = self._communicator.all_gather_request(self._lengths, self._length)

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        if self._communicator.poll([self._request]) and self._texts is None:
            longest = int(self._lengths.max())
            self._mine = torch.nn.functional.pad(self._mine, (0, longest - len(self._mine)))
            self._texts = torch.zeros(self._communicator.size * longest, dtype=torch.uint8)
            self._request = self._communicator.all_gather_request(self._texts, self._mine)
        return self._texts is not None and self._communicator.poll([self._request])

    def received(self) -> list[list[Message]]:
        """Return everyone's messages, by rank."""
        assert self._texts is not None
        rows = self._texts.view(self._communicator.size, -1)
        return [
            pickle.loads(row[:length].numpy().tobytes())
            for row, length in zip(rows, self._lengths.tolist(), strict=True)
        ]
