"""Where MPI refuses to go on, memory that it may still write to is kept."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from mpisgd.errors import PeerLost
from mpisgd.monitor.mpi_mailbox import MpiMailbox


def test_the_memory_of_pending_receives_outlives_an_error_midway():
    """The list of them was taken apart while they were polled: buffers were freed under pending receives."""
    kept: list[object] = []

    def poll(requests: list[str]) -> bool:
        if requests == ["second"]:
            raise PeerLost("rank 1 was lost")
        return False

    def abandon(requests: list[str], memory: object) -> None:
        kept.extend(requests)
        kept.append(memory)

    communicator = SimpleNamespace(rank=0, poll=poll, probe=lambda: None, abandon=abandon)
    mailbox = MpiMailbox(communicator, [1, 2])
    mailbox._receives = [(name, torch.zeros(1)) for name in ("first", "second", "third")]
    assert mailbox.questions() == []
    assert kept[:3] == ["first", "second", "third"]
    assert len(kept[3]) == 3
