"""All-reduces between more hosts than send each other one message each: by halving and doubling."""

from __future__ import annotations

import functools

import pytest
import torch

import mpisgd
from mpisgd.job.lifecycle import world
from mpisgd.job.threads_as_ranks import run_ranks
from mpisgd.tools.plan.network import Placement
from mpisgd.tools.plan.simulation.messages import collective_rounds
from mpisgd.transport.internode.leader_exchange import PAYLOAD_BYTES
from mpisgd.transport.internode.schedule import FEW_HOSTS, MOST_BYTES, halves

# Powers of two, with a rest, and with as many ranks as there are hosts or more.
HOSTS = {
    "16": (1,) * 16,
    "16 of one or two": (1, 2) * 8,
    "13": (1,) * 13,
    "9 of two": (2,) * 9,
}
SMALL = PAYLOAD_BYTES // 4
COUNTS = (0, 1, 17, SMALL, SMALL + 1, MOST_BYTES // 4 + 5)


def given(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Whole numbers, of which every order of additions is exact."""
    return ((torch.arange(count) % 11 * 7 + 3 * rank) % 11 - 4).to(dtype)


@functools.lru_cache
def total(size: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    added = sum(given(rank, count, torch.int64) for rank in range(size))
    return (added.remainder(256) if dtype == torch.uint8 else added).to(dtype)


@pytest.mark.parametrize("name", HOSTS)
def test_sums_are_those_of_all_ranks(name):
    size = sum(HOSTS[name])
    assert len(HOSTS[name]) > FEW_HOSTS

    def program():
        for count in COUNTS:
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
                mine = given(mpisgd.rank(), count, dtype)
                mpisgd.all_reduce(mine, algorithm="hierarchical")
                assert mine.equal(total(size, count, dtype)), (count, dtype)
        worst = given(mpisgd.rank(), 5, torch.float32)
        mpisgd.all_reduce(worst, "min", algorithm="hierarchical")
        assert worst.eq(torch.stack([given(rank, 5, torch.float32) for rank in range(size)]).amin(0)).all()
        mean = given(mpisgd.rank(), 5, torch.float64)
        mpisgd.all_reduce(mean, "avg", algorithm="hierarchical")
        return mean

    means = run_ranks(size, program, ranks_per_host=HOSTS[name], seed=3, num_draws=400)
    expected = torch.stack([given(rank, 5, torch.float64) for rank in range(size)]).mean(0)
    assert all(torch.allclose(mean, expected, rtol=1e-12, atol=0) for mean in means)


@pytest.mark.parametrize("name", ["16", "13"])
def test_all_ranks_get_the_same_bits_whatever_the_order_of_messages(name):
    size = sum(HOSTS[name])

    def program():
        small, large = (
            torch.randn(n, generator=torch.Generator().manual_seed(mpisgd.rank())) for n in (9, 9000)
        )
        for tensor in (small, large):
            mpisgd.all_reduce(tensor, algorithm="hierarchical")
        return small.tolist() + large.tolist()

    runs = [run_ranks(size, program, ranks_per_host=HOSTS[name], seed=seed) for seed in range(2)]
    assert all(values == runs[0][0] for values in (*runs[0], *runs[1]))


def test_a_mismatch_is_found_on_every_rank():
    def program():
        for wrong in (0, 9, 12):
            tensor = torch.ones(4 + (mpisgd.rank() == wrong))
            with pytest.raises(mpisgd.CollectiveMismatch):
                mpisgd.all_reduce(tensor)
            assert tensor.eq(1.0).all()
        tensor = torch.ones(4)
        mpisgd.all_reduce(tensor)
        return tensor.tolist()

    assert run_ranks(13, program, ranks_per_host=(1,) * 13) == [[13.0] * 4] * 13


def test_only_powers_of_two_are_halved():
    assert [hosts for hosts in range(1, 70) if halves(hosts)] == [16, 32, 64]


def test_the_planner_counts_the_messages_that_are_sent():
    hosts, nbytes = 16, 65536  # of which each message is sent whole

    def program():
        communicator = world().queue.communicator
        tensor = torch.ones(nbytes // 4)
        counts = []
        for act in (mpisgd.barrier, lambda: mpisgd.all_reduce(tensor)):
            before = communicator.sent_messages, communicator.sent_bytes
            act()
            counts.append((communicator.sent_messages - before[0], communicator.sent_bytes - before[1]))
        (check, check_bytes), (sent, sent_bytes) = counts
        return sent - check, sent_bytes - check_bytes

    rounds = collective_rounds("all_reduce", "hierarchical", Placement(hosts, 1), nbytes)
    expected = len(rounds), sum(each.nbytes for each in rounds)
    assert run_ranks(hosts, program, ranks_per_host=(1,) * hosts) == [expected] * hosts
