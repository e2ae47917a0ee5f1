"""The memory of a receive that was cancelled is there until MPI has written to it."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import mpisgd
from mpisgd.errors import PeerLost
from mpisgd.job.lifecycle import current_job
from mpisgd.monitor.rank_state import Message
from mpisgd.threads.waiting import Backoff
from mpisgd.transport.messages.link import Link
from mpisgd.transport.messages.message_work import InFlight, MessageWork
from mpisgd.transport.messages.point_to_point import PointToPoint
from mpisgd.transport.mpi.communicator import free_abandoned

NUMEL = 300_000  # more than MPI sends before the receiver has asked for it


@pytest.mark.mpi(min_size=2)
def test_what_comes_late_is_written_to_memory_that_was_kept(monkeypatch):
    communicator = current_job().communicator.duplicate()
    rank = communicator.rank
    theirs = torch.full((NUMEL,), -1.0)
    memory = weakref.ref(theirs.untyped_storage())
    if rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(Backoff, "wait_for", lost)
            with pytest.raises(PeerLost):
                Link(communicator, "test", 5.0).recv(theirs, 1)
        del theirs
        free_abandoned()
        gc.collect()
        assert memory() is not None
    mpisgd.barrier()
    if rank == 1:
        Link(communicator, "test", 20.0).send(torch.arange(NUMEL, dtype=torch.float32) + rank, 0)
    if rank == 0:
        kept = memory()
        assert kept is not None
        late = torch.empty(0).set_(kept)
        assert Backoff(20.0).wait_for(lambda: communicator.progress() or late[-1].item() == NUMEL)
        assert torch.equal(late, torch.arange(NUMEL) + 1.0)
        del kept, late
        assert Backoff(20.0).wait_for(lambda: free_abandoned() or gc.collect() < 0 or memory() is None)
    mpisgd.barrier()
    communicator.free()


class MatchedRequest:
    """A receive whose message is coming in: it cannot be cancelled any more."""

    is_over = False

    def Cancel(self) -> None:
        """Does nothing."""

    def Free(self) -> None:
        """MPI goes on nevertheless."""

    def Test(self, status: object = None) -> bool:
        return self.is_over


def test_the_memory_of_a_receive_that_is_cancelled_too_late_is_kept():
    messages = PointToPoint(current_job().communicator, timeout_s=5.0, threads_allowed=False)
    tensor, request = torch.zeros(5), MatchedRequest()
    memory = weakref.ref(tensor.untyped_storage())
    message = Message("test", True, (0,), 0)
    work = MessageWork(messages, "recv", message, request, (tensor, None), print)  # type: ignore[arg-type]
    work.cancel()
    assert isinstance(work.error, mpisgd.NotInitialized), "its future must not be given what never came"
    del work, tensor
    free_abandoned()
    gc.collect()
    assert memory() is not None
    request.is_over = True
    free_abandoned()
    gc.collect()
    assert memory() is None


@pytest.mark.mpi(min_size=2)
def test_a_receive_whose_message_is_there_is_finished_at_the_end(groups):
    messages = groups["world"].point_to_point
    tensor = torch.zeros(3)
    if mpisgd.rank() == 0:
        work = mpisgd.irecv(tensor, 1)
    mpisgd.barrier()
    if mpisgd.rank() == 1:
        mpisgd.send(torch.full((3,), 7.0), 0)
    mpisgd.barrier()
    if mpisgd.rank() == 0:
        assert Backoff(20.0).wait_for(lambda: messages.communicator.progress() or tensor[2].item() == 7.0)
        messages.drain([InFlight()] * mpisgd.size())
        assert work.source == 1


def lost(*_: object) -> bool:
    raise PeerLost("made up")


def test_asking_for_lost_ranks_leaves_nothing_behind():
    """Each question left a group of MPI's behind: 230 MB a day."""
    freed: list[str] = []
    failed = SimpleNamespace(size=0, Free=lambda: freed.append("failed"))
    asked = SimpleNamespace(progress=lambda: None, comm=SimpleNamespace(Get_failed=lambda: failed))
    communicator = type(current_job().world.queue.communicator)
    assert communicator.lost(asked) == []
    assert freed == ["failed"]
