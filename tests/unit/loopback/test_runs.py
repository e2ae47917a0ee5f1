"""Ranks that are threads: the same results as any job's, the same run from the same seed."""

from __future__ import annotations

import time

import pytest
import torch

import mpisgd
from mpisgd.job.threads_as_ranks import RankFailed, run_ranks
from mpisgd.threads import scheduling

HOSTS = {1: [()], 2: [(), (1, 1)], 3: [(), (1, 2), (1, 1, 1)], 4: [(), (2, 2), (3, 1)]}
CASES = [(size, hosts) for size, divisions in HOSTS.items() for hosts in divisions]


@pytest.mark.parametrize(("size", "hosts"), CASES)
def test_collectives_give_what_they_give_under_mpi(size, hosts):
    def program():
        rank = mpisgd.rank()
        total = torch.arange(5.0) * (rank + 1)
        mpisgd.all_reduce(total)
        large = torch.full((200_000,), float(rank))
        work = mpisgd.all_reduce(large, async_op=True)
        last = torch.tensor([rank, rank * rank])
        mpisgd.broadcast(last, size - 1)
        work.wait()
        names = [None] * size
        mpisgd.all_gather_object(names, {"rank": rank})
        return total, large, last, names

    for seed in range(3):
        for total, large, last, names in run_ranks(size, program, seed=seed, ranks_per_host=hosts):
            assert total.equal(torch.arange(5.0) * (size * (size + 1) // 2))
            assert large.eq(float(size * (size - 1) // 2)).all()
            assert last.tolist() == [size - 1, (size - 1) ** 2]
            assert names == [{"rank": rank} for rank in range(size)]


def order_of_ranks(seed: int) -> list[int]:
    order: list[int] = []

    def program():
        for _ in range(20):
            mpisgd.barrier()
            order.append(mpisgd.rank())

    run_ranks(4, program, seed=seed, ranks_per_host=(2, 2))
    return order


def test_a_seed_gives_the_same_run_and_another_one_another():
    assert order_of_ranks(1) == order_of_ranks(1)
    assert len({tuple(order_of_ranks(seed)) for seed in range(5)}) > 1


def test_a_timeout_takes_no_time_and_names_who_is_missing():
    def program():
        if mpisgd.rank() == 1:
            scheduling.sleep(3 * 3600.0)
        mpisgd.barrier()

    began_s = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run_ranks(3, program, timeout_s=3600.0)
    assert time.monotonic() - began_s < 30.0
    error = caught.value.errors[caught.value.rank]
    assert isinstance(error, mpisgd.CollectiveTimeout), error
    assert "has waited 3600.0 s for rank 1" in str(error)


def test_a_mismatch_is_found_on_every_rank():
    def program():
        tensor = torch.ones(4 + mpisgd.rank())
        with pytest.raises(mpisgd.CollectiveMismatch) as caught:
            mpisgd.all_reduce(tensor)
        return str(caught.value)

    texts = run_ranks(3, program)
    assert all("[4]" in text and "[6]" in text for text in texts), texts


def test_an_error_of_one_rank_ends_the_others():
    def program():
        if mpisgd.rank() == 2:
            raise KeyError("of rank 2")
        mpisgd.barrier()

    with pytest.raises(RankFailed) as caught:
        run_ranks(4, program)
    assert isinstance(caught.value.errors[2], KeyError)
    assert isinstance(caught.value.__cause__, KeyError)


def test_messages_of_one_rank_keep_their_order_and_those_of_two_overtake_each_other():
    orders = set()

    def program():
        if mpisgd.rank():
            for number in range(4):
                mpisgd.send(torch.tensor([mpisgd.rank(), number]), 0)
            return None
        seen = []
        for _ in range(8):
            message = torch.zeros(2, dtype=torch.int64)
            mpisgd.recv(message)
            seen.append(tuple(message.tolist()))
        return tuple(seen)

    for seed in range(6):
        seen = run_ranks(3, program, seed=seed)[0]
        for source in (1, 2):
            assert [number for rank, number in seen if rank == source] == [0, 1, 2, 3]
        orders.add(seen)
    assert len(orders) > 1


def test_groups_are_made_and_used_side_by_side():
    def program():
        rank = mpisgd.rank()
        halves = [mpisgd.new_group([0, 2]), mpisgd.new_group([1, 3])]
        mine = halves[rank % 2]
        tensors = [torch.full((3,), float(rank)) for _ in range(3)]
        works = [mpisgd.all_reduce(tensor, group=mine, async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
        return [float(tensor[0]) for tensor in tensors]

    assert run_ranks(4, program, seed=5) == [[2.0] * 3, [4.0] * 3, [2.0] * 3, [4.0] * 3]


def test_many_ranks():
    def program():
        total = torch.tensor([mpisgd.rank()])
        mpisgd.all_reduce(total)
        return int(total)

    assert run_ranks(64, program, ranks_per_host=(16,) * 4) == [64 * 63 // 2] * 64


def test_a_rank_that_exits_or_fails_as_pytest_does_is_told():
    """Only subclasses of Exception were noted: the others waited, and then there was a KeyError."""

    def program():
        if mpisgd.rank() == 1:
            raise SystemExit(3)
        mpisgd.barrier()

    with pytest.raises(RankFailed, match="rank 1 has raised") as caught:
        run_ranks(3, program)
    assert isinstance(caught.value.errors[1], SystemExit)
