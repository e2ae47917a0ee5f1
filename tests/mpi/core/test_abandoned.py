"""The memory of a receive that was given up is there until MPI has written to it."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import mpisgd
from mpisgd.core.waiting import Backoff
from mpisgd.errors import PeerLost
from mpisgd.job.lifecycle import current_job, let_go
from mpisgd.transport.messages.link import Link

NUMEL = 300_000  # more than MPI sends before the receiver has asked for it


@pytest.mark.mpi(min_size=2)
def test_what_comes_late_is_written_to_memory_that_was_kept(monkeypatch):
    wire = current_job().wire.duplicate()
    rank = wire.rank
    theirs = torch.full((NUMEL,), -1.0)
    memory = weakref.ref(theirs.untyped_storage())
    if rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(Backoff, "wait_for", lost)
            with pytest.raises(PeerLost):
                Link(wire, "test", 5.0).recv(theirs, 1)
        del theirs
        let_go()
        gc.collect()
        assert memory() is not None
    mpisgd.barrier()
    if rank == 1:
        Link(wire, "test", 20.0).send(torch.arange(NUMEL, dtype=torch.float32) + rank, 0)
    if rank == 0:
        kept = memory()
        assert kept is not None
        late = torch.empty(0).set_(kept)
        assert Backoff(20.0).wait_for(lambda: wire.progress() or late[-1].item() == NUMEL)
        assert torch.equal(late, torch.arange(NUMEL) + 1.0)
        del kept, late
        assert Backoff(20.0).wait_for(lambda: let_go() or gc.collect() < 0 or memory() is None)
    mpisgd.barrier()
    wire.free()


def lost(*_: object) -> bool:
    raise PeerLost("made up")
