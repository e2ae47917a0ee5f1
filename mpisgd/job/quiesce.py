"""`end_operations`: no rank leaves a group while another one is in the middle of an operation.

Ranks may end several groups at once, and others one of them: all are polled together, and none blocks in MPI.
"""

import pickle
from collections.abc import Iterator, Sequence

import torch

from mpisgd.core.consistency import ConsistencyCheck, Operation
from mpisgd.core.group import Group
from mpisgd.errors import CollectiveTimeout, MpisgdError, afresh
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff
from mpisgd.transport.messages.message_work import InFlight

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
            raise afresh(group.queue.broken)
    for end in ends:
        end.group.point_to_point.drain(end.in_flight)
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
    """The end of one group: all members come to it, then tell each other which messages are in flight.

    Attributes:
        in_flight: which these are, by group rank, once it is over; empty where there are none at all.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.check = ConsistencyCheck(Operation("shutdown"), lambda: "the end of the program")
        group.queue.consistency.begin(self.check)
        self.in_flight: list[InFlight] = []
        self._is_over = False
        self._steps = self._exchange(group.queue.communicator)

    def advance(self) -> bool:
        """Go as far as possible without waiting; return whether it is over."""
        next(self._steps, None)
        return self._is_over

    def _exchange(self, communicator: GroupCommunicator) -> Iterator[None]:
        """Gather what is in flight, if anything is: lengths, then pickles; yield while others are late."""
        while not self.check.advance() or self.check.differs():
            yield
        last_words = self.group.point_to_point.last_words()
        pickled = pickle.dumps(last_words)
        lengths = torch.zeros(communicator.size, dtype=torch.int64)
        length = torch.tensor([len(pickled) if last_words.messages else -len(pickled)])
        request = communicator.all_gather_request(lengths, length)
        while not communicator.poll([request]):
            yield
        if bool((lengths > 0).any()):
            longest = int(lengths.abs().max())
            mine = torch.frombuffer(bytearray(pickled.ljust(longest)), dtype=torch.uint8)
            texts = torch.zeros(communicator.size * longest, dtype=torch.uint8)
            request = communicator.all_gather_request(texts, mine)
            while not communicator.poll([request]):
                yield
            # A pickle says itself where it ends.
            rows = texts.view(communicator.size, -1)
            self.in_flight = [pickle.loads(row.numpy().tobytes()) for row in rows]
        self._is_over = True

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
