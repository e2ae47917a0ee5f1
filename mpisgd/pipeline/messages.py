"""Messages between the ranks of a pipeline. A rank that raises tells the others, so that no wait is for ever.

Receives are started before they are needed, sends are never waited for within a step, and each message has
the tag of its connection, direction and micro-batch. Before ranks call a collective they tell each other that
they have come: a rank that has failed never comes, and the others learn that while they still wait here.
"""

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd import tracing
from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.core.group import Group
from mpisgd.core.work import Work
from mpisgd.errors import CollectiveTimeout, InvalidArgument, PipelineFailed
from mpisgd.threads.wait_registry import WaitReason
from mpisgd.threads.waiting import Backoff
from mpisgd.transport.messages.message_work import MessageWork

__all__ = ["FIRST_TAG", "PipelineMessages"]

FAILURE_TAG, EXCHANGE_TAG = 1, 2
FIRST_TAG = 16  # of the stages' messages
MOST_BYTES = 2048  # of a pickled object
TELL_S = 1.0  # short messages are through at once, unless a rank is gone


class PipelineMessages:
    """What one rank sends to and receives from the others; ranks are places in the group.

    Args:
        group: of its own; left when a rank fails.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self._sends: list[MessageWork] = []

    def send(self, tensor: Tensor, dst: int, tag: int) -> None:
        """Start sending; the memory is left alone until `settle`, or until the message is through."""
        self._sends = [work for work in self._sends if not work.is_completed()]
        self._sends.append(isend(tensor, self.group.ranks[dst], self.group, tag))

    def receive(self, tensor: Tensor, src: int, tag: int) -> MessageWork:
        """Start receiving."""
        return irecv(tensor, self.group.ranks[src], self.group, tag)

    def send_object(self, obj: Any, dst: int, tag: int) -> None:
        """Send a small object."""
        pickled = pickle.dumps(obj)
        if len(pickled) > MOST_BYTES:
            raise InvalidArgument(
                f"pipeline: {type(obj).__name__} of {len(pickled)} bytes is too long to send"
            )
        room = bytearray(pickled.ljust(MOST_BYTES))
        self.send(torch.frombuffer(room, dtype=torch.uint8), dst, tag)

    def receive_object(self, src: int, tag: int) -> Callable[[], Any]:
        """Start receiving a small object; the result waits for it and returns it."""
        room = torch.empty(MOST_BYTES, dtype=torch.uint8)
        work = self.receive(room, src, tag)

        def arrived() -> Any:
            self.wait(work)
            return pickle.loads(room.numpy().tobytes())  # a pickle says itself where it ends

        return arrived

    def exchange(self, obj: Any, ranks: Sequence[int]) -> list[Any]:
        """Return the small objects of these ranks, this one among them, once all have come."""
        me = self.group.rank
        others = [rank for rank in ranks if rank != me]
        arrived = {rank: self.receive_object(rank, EXCHANGE_TAG) for rank in others}
        for rank in others:
            self.send_object(obj, rank, EXCHANGE_TAG)
        theirs = {rank: arrived[rank]() for rank in others}
        return [obj if rank == me else theirs[rank] for rank in ranks]

    def wait(self, work: MessageWork) -> None:
        """Wait for a message.

        Raises:
            PipelineFailed: another rank has failed meanwhile.
            CollectiveTimeout: nothing came.
        """
        if not work.is_through():
            self._wait_for(work)
        work.wait()

    def settle(self) -> None:
        """Wait for all that was sent."""
        for work in self._sends:
            self.wait(work)
        self._sends.clear()

    def _wait_for(self, work: MessageWork) -> None:
        def ready() -> bool:
            return work.is_through() or self._somebody_failed()

        def reason() -> WaitReason:
            return WaitReason(work.name, work.message.group, work.message.partners, message=work.message)

        backoff = Backoff(self.group.point_to_point.timeout_s)
        with tracing.blocked(work.name):
            through = backoff.wait_for(ready, about=reason)
        if not through:
            seen = f" ({backoff.missing})" if backoff.missing else ""
            raise CollectiveTimeout(
                f"pipeline: {work.name}: waited {backoff.waited_s:.1f} s; has that rank called step()?{seen}"
            )

    # -- failures ---------------------------------------------------------------------------------------

    def tell_failure(self, text: str) -> None:
        """Tell all other ranks that this one has failed."""
        told = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        group = self.group
        works: list[Work] = [
            isend(told, rank, group, FAILURE_TAG) for rank in group.ranks if rank != group.ranks[group.rank]
        ]
        Backoff(TELL_S, quiet=True).wait_for(lambda: all(work.is_completed() for work in works))

    def _somebody_failed(self) -> bool:
        """Raise if another rank has told of a failure."""
        found = self.group.point_to_point.communicator.probe(FAILURE_TAG)
        if found is None:
            return False
        src, tag, nbytes = found
        text = torch.empty(nbytes, dtype=torch.uint8)
        self.receive(text, src, tag).wait()
        raise PipelineFailed(text.numpy().tobytes().decode())
