"""An all-reduce between hosts that is not finished, on a communicator where nothing arrives."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mpisgd.core.topology import arrange
from mpisgd.dtypes import ReduceOp
from mpisgd.errors import CollectiveTimeout
from mpisgd.transport.internode.schedule import CHUNK_BYTES
from mpisgd.transport.internode.transport import InternodeTransport
from mpisgd.transport.members import Members


class SilentCommunicator:
    """A communicator of two ranks, one of which never answers."""

    rank, size, global_ranks = 0, 2, (0, 1)

    def __init__(self) -> None:
        self.started: list[object] = []
        self.abandoned: list[object] = []
        self.kept: list[object] = []

    def isend(self, *_: object) -> object:
        self.started.append(SimpleNamespace())
        return self.started[-1]

    irecv = isend

    def poll(self, requests: list[object]) -> bool:
        return False

    def abandon(self, requests: list[object], memory: object) -> None:
        self.abandoned += requests
        self.kept.append(memory)


@pytest.mark.parametrize("num_chunks", [1, 3, 6])
def test_the_memory_of_every_chunk_in_flight_is_kept_when_the_time_is_over(num_chunks):
    """The requests of later chunks were not abandoned: their memory could be freed before MPI wrote to it."""
    communicator, where = SilentCommunicator(), arrange(0, [0, 1], ["host0", "host1"])
    members = Members(communicator, where, lambda nbytes, half: 1, "test", 0.01)  # type: ignore[arg-type]
    transport = InternodeTransport(members, None, None)
    with pytest.raises(CollectiveTimeout):
        transport.all_reduce_now(torch.zeros(num_chunks * CHUNK_BYTES // 4), ReduceOp.SUM)
    assert communicator.started
    assert communicator.abandoned == communicator.started
    assert len(communicator.kept) == 1
