"""The optimizer state of shared parameters: each rank has that of its own ones, a checkpoint has all."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from mpisgd.accelerator.buffers import readable
from mpisgd.collectives.objects import allocate_tensors, extract_tensors
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.transport.shm.data_movement import exchange_spans
from mpisgd.transport.shm.staging import Span, consecutive_spans, range_of
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["gather_states"]

States = dict[int, Any]


def gather_states(mine: States, group: Group) -> States:
    """Return the states of all parameters, brought together from the ranks of this host. Collective.

    Args:
        mine: states of the parameters that this rank owns, by index.
        group: each of whose hosts has all parameters.

    Cost: every rank of a host receives what the others own, through shared memory.
    """
    everyones = dict(mine)
    memory, local = group.transports.memory, group.transports.local

    def exchange() -> None:
        if memory is None or local is None:
            return
        outline, tensors = extract_tensors(mine)
        theirs = [allocate_tensors(other) for other in local.all_gather_object(outline)]
        rooms = [tensors if rank == memory.rank else room for rank, (_, room) in enumerate(theirs)]
        _exchange(memory, rooms)
        for rank, (states, _) in enumerate(theirs):
            everyones.update(mine if rank == memory.rank else states)

    group.queue.run(Operation("shared parameters", extra="optimizer state"), exchange)
    return everyones


def _exchange(memory: ShmTransport, rooms: Sequence[Sequence[Tensor]]) -> None:
    """Fill everyone's `rooms[r]` with what the r-th rank has there. Inside the queue."""
    flats = [[readable(tensor) for tensor in of_one] for of_one in rooms]
    streams = [consecutive_spans(map(range_of, of_one), rank) for rank, of_one in enumerate(flats)]
    takes = [span for rank, stream in enumerate(streams) if rank != memory.rank for span in stream]
    memory.run_steps(exchange_spans(memory, streams[memory.rank], takes, max(map(_length, streams))))


def _length(stream: Sequence[Span]) -> int:
    return stream[-1].start + stream[-1].nbytes if stream else 0
