"""The helper thread of asynchronous gossip, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

import mpisgd
from mpisgd.job.lifecycle import current_job
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks
from mpisgd.methods.gossip.ad_psgd import pairwise_averaging
from mpisgd.methods.gossip.ad_psgd.bipartite import Roles
from mpisgd.methods.strategy.flat_copy import FlatCopy
from mpisgd.threads import scheduling

ROLES = Roles(asks=(True, False), partners=((1,), (0,)))


def exchange_once() -> list[float]:
    x = FlatCopy([torch.zeros(3)])
    x.load([torch.full((3,), 2.0 * mpisgd.rank())])
    communicator = current_job().world.queue.communicator.duplicate()
    averaging = pairwise_averaging.PairwiseAveraging(communicator, ROLES, x)
    if mpisgd.rank() == 0:
        averaging.want_exchange()
        while averaging.num_exchanges == 0:
            averaging.want_exchange()  # raises what has ended the thread
            scheduling.sleep(0.001)
    mpisgd.barrier()
    averaging.finish(10.0)
    result = [torch.zeros(3)]
    x.unload(result)
    return result[0].tolist()


def test_an_exchange_is_the_mean_of_the_two():
    assert run_ranks(2, exchange_once) == [[1.0] * 3, [1.0] * 3]


def test_whatever_ends_the_thread_is_raised_where_it_is_noticed(monkeypatch):
    add = FlatCopy.add_difference_

    def fails_on_rank_0(self, *arguments):
        if mpisgd.rank() == 0:
            raise MemoryError("no memory for the difference")
        add(self, *arguments)

    monkeypatch.setattr(FlatCopy, "add_difference_", fails_on_rank_0)
    with pytest.raises(RankFailed, match="no memory for the difference"):
        run_ranks(2, exchange_once)
