"""`Ring`: ranks in a circle, around which keys and values travel while each computes with what it has."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import MpisgdError
from mpisgd.job.groups import open_group
from mpisgd.transport.messages.message_work import MessageWork

__all__ = ["Ring", "ring_of"]

FORWARD_TAG, GRADIENT_TAG = 1, 2


class Ring:
    """The ranks of a group in a circle.

    It has a group of its own: its order is that of the calls of attention, which no bucket of gradients that
    is reduced meanwhile delays, and its messages meet none of the program's.

    Args:
        group: of its own.

    Attributes:
        group: as given.
        rank, size: in the group.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.size = group.rank, group.size
        self._num_calls = 0

    def next_number(self) -> int:
        """Return the number of a call of attention, the same on all ranks."""
        self._num_calls += 1
        return self._num_calls

    def agree(
        self, name: str, describe: Callable[[], str], *, when: str = "", problem: MpisgdError | None = None
    ) -> None:
        """Make sure that all ranks are at the same call, and find nothing wrong with it. Collective.

        Args:
            name: of the call.
            describe: tells what must be equal; not called where there is a problem.
            when: what must be equal, and is different in each call.
            problem: what this rank has found, and raises once the others know.

        Raises:
            MpisgdError: the problem.
            CollectiveMismatch: the ranks' calls, or what they have found, differ; on every rank.
        """
        if self.size > 1:
            text = f"refused here: {problem}" if problem else describe()
            self.group.queue.run(Operation(name, extra=text, when="" if problem else when), lambda: None)
        if problem is not None:
            raise problem

    def rotate(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Yield (rank, tensors) for each rank, this one first, then the one before it, and so on.

        What comes next travels meanwhile. The tensors of others are in memory of the ring.
        """
        here, spare = [tensor.contiguous() for tensor in tensors], list[Tensor]()
        for step in range(self.size):
            works, there = list[MessageWork](), list[Tensor]()
            if step < self.size - 1:
                there = spare or [torch.empty_like(tensor) for tensor in here]
                works = [*self.receive(there, FORWARD_TAG), *self.send(here, FORWARD_TAG)]
            yield (self.rank - step) % self.size, here
            for work in works:
                work.wait()
            here, spare = there, here if step else []  # those of the first step are the program's

    def send(self, tensors: Sequence[Tensor], tag: int = GRADIENT_TAG) -> list[MessageWork]:
        """Start sending to the next rank."""
        to = self.group.ranks[(self.rank + 1) % self.size]
        return [self._begun(isend(tensor, to, self.group, tag)) for tensor in tensors]

    def receive(self, tensors: Sequence[Tensor], tag: int = GRADIENT_TAG) -> list[MessageWork]:
        """Start receiving from the rank before; contiguous memory."""
        source = self.group.ranks[(self.rank - 1) % self.size]
        return [self._begun(irecv(tensor, source, self.group, tag)) for tensor in tensors]

    def _begun(self, work: MessageWork) -> MessageWork:
        """Let a message go on while this thread computes: MPI moves long ones only while it is called."""
        if self.group.point_to_point.threads_allowed:
            work.get_future()
        return work


def ring_of(group: Group) -> Ring:
    """Return the ring of a group's ranks. Collective over these the first time."""
    if Ring not in group.made_for:
        own = group if group.size == 1 else open_group(group.job, group.ranks, name=f"ring of {group.name}")
        group.made_for[Ring] = Ring(own)
    ring: Ring = group.made_for[Ring]
    return ring
