"""Ranks of which one runs at a time: nothing is written too early, not even where others may write."""

from __future__ import annotations

import pytest
import torch

import mpisgd
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks
from mpisgd.transport.shm.at_once import AllReduceAtOnce
from mpisgd.transport.shm.staging import copy_bytes
from mpisgd.transport.shm.transport import ShmTransport


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    monkeypatch.setenv("MPISGD_CHECK_STAGING", "1")


@pytest.mark.parametrize("hosts", [(), (2, 1), (1, 1, 1)])
@pytest.mark.parametrize("numel", [1, 2**18 + 3])
def test_no_operation_writes_too_early(hosts, numel):
    def program():
        rank, size = mpisgd.rank(), mpisgd.size()
        mine = torch.full((numel,), rank + 1.0)
        mpisgd.all_reduce(mine)
        mpisgd.reduce(mine, 1)
        mpisgd.broadcast_coalesced([mine, mine.clone()], 1)
        everyones = [torch.zeros(numel) for _ in range(size)]
        mpisgd.all_gather(everyones, mine)
        mpisgd.reduce_scatter(mine, everyones)
        mpisgd.all_to_all(everyones, [mine] * size)
        return float(everyones[0][-1])

    assert run_ranks(3, program, seed=numel, ranks_per_host=hosts) == [3.0 * 18.0] * 3


@pytest.mark.parametrize("at_once", [True, False])
def test_a_transport_that_writes_into_the_coming_half_of_another_rank_is_found(monkeypatch, at_once):
    def begin(shm, tensor):
        copy_bytes(shm.next_addresses()[(shm.rank + 1) % shm.size], tensor.data_ptr(), tensor.nbytes)

    def all_reduce(shm, flat, op):
        begin(shm, flat)
        yield

    monkeypatch.setattr(AllReduceAtOnce, "begin", lambda reduction, tensor: begin(reduction._shm, tensor))
    if not at_once:
        monkeypatch.setattr(ShmTransport, "all_reduce", all_reduce)
        monkeypatch.setattr(ShmTransport, "all_reduce_at_once", lambda *form: None)
    with pytest.raises(RankFailed, match="has written into staging buffer"):
        run_ranks(2, lambda: mpisgd.all_reduce(torch.ones(3), algorithm="node"))
