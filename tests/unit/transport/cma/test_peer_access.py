"""Who leaves an operation early does so when nobody writes into its memory any more."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mpisgd.transport.cma import peer_access as module
from mpisgd.transport.cma.peer_access import PeerAccess
from mpisgd.transport.ipc.control_block import CONTROL_BYTES, ControlBlock
from mpisgd.transport.ipc.segment import Segment


@pytest.fixture
def ranks():
    segment = Segment(-1, CONTROL_BYTES, 3)
    return [PeerAccess(ControlBlock(segment, rank, range(3), lambda: None)) for rank in range(3)]


def test_who_is_there_may_be_written_to(ranks):
    ranks[0].grant(torch.zeros(1))
    assert ranks[1].begin_access()
    assert ranks[2].begin_access()
    ranks[1].end_access()
    ranks[0].end()


def test_who_leaves_waits_for_those_who_write_and_nobody_begins_again(ranks):
    ranks[0].grant(torch.zeros(1))
    assert ranks[2].begin_access()
    left = threading.Event()
    leaver = threading.Thread(target=lambda: (ranks[0].revoke(), left.set()))
    leaver.start()
    time.sleep(0.2)
    assert not left.is_set()
    assert not ranks[1].begin_access()
    ranks[2].end_access()
    assert left.wait(10)
    leaver.join()
    assert ranks[0].is_revoked
    assert not ranks[2].begin_access()


def test_who_wrote_itself_does_not_keep_others_from_leaving(ranks):
    for rank in ranks[:2]:
        rank.grant(torch.zeros(1))
        rank.begin_access()
    ranks[0].revoke()  # says that it writes no more, before it waits
    before = time.monotonic()
    ranks[1].revoke()
    assert time.monotonic() - before < module.WRITER_TIMEOUT_S


def test_memory_that_somebody_dead_may_still_write_to_is_kept(ranks, monkeypatch):
    monkeypatch.setattr(module, "WRITER_TIMEOUT_S", 0.05)
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(module, "_kept", kept)
    tensor = torch.zeros(1)
    ranks[0].grant(tensor)
    assert ranks[1].begin_access()
    ranks[0].revoke()
    assert kept[0] is tensor


def test_who_has_nothing_exposed_leaves_at_once(ranks):
    ranks[1].begin_access()
    ranks[0].revoke()
    assert not ranks[0].is_revoked
