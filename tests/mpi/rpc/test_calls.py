"""Calls of functions on other ranks, and on this one."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from verdicts import everyone, raises_everywhere, referee

import mpisgd
from mpisgd import rpc
from mpisgd.threads import wait_registry


def next_rank() -> int:
    return (mpisgd.rank() + 1) % mpisgd.size()


def place_and_sum(tensor: torch.Tensor, plus: float = 0.0) -> tuple[int, torch.Tensor]:
    return mpisgd.rank(), tensor.cumsum(0) + plus


def fail(text: str) -> None:
    raise ZeroDivisionError(f"{text} on rank {mpisgd.rank()}")


def sleep(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@pytest.fixture(autouse=True)
def _running(workers):
    yield
    referee().barrier()  # a test's calls are over before the next one begins


def mine() -> torch.Tensor:
    return torch.arange(5.0, dtype=torch.float64) * (mpisgd.rank() + 1)


def test_a_function_runs_on_every_rank_that_is_called(workers):
    for rank, name in enumerate(workers):
        for to in (name, rank, rpc.get_worker_info(name)):
            where, result = rpc.rpc_sync(to, place_and_sum, (mine(),), {"plus": 0.5})
            assert where == rank
            assert torch.equal(result, mine().cumsum(0) + 0.5)


def test_asynchronous_calls_of_all_ranks_at_once(workers):
    calls = [
        rpc.rpc_async(name, place_and_sum, (mine() * i,)) for i, name in enumerate(workers) for _ in "abc"
    ]
    results = torch.futures.wait_all(calls)
    assert [where for where, _ in results] == [rank for rank in range(len(workers)) for _ in "abc"]
    assert all(torch.equal(result, (mine() * where).cumsum(0)) for where, result in results)
    doubled = rpc.rpc_async(next_rank(), torch.add, (mine(), 1)).then(lambda done: done.wait() * 2)
    assert torch.equal(doubled.wait(), (mine() + 1) * 2)


def test_large_tensors_arrive_whole(workers):
    large = torch.arange(1 << 20, dtype=torch.float64) + mpisgd.rank()
    assert torch.equal(rpc.rpc_sync(next_rank(), torch.neg, (large,)), -large)


def test_an_object_stays_where_it_was_made(workers):
    reference = rpc.remote(next_rank(), place_and_sum, (mine(),))
    assert reference.owner().id == next_rank()
    where, result = reference.to_here()
    assert where == next_rank()
    assert torch.equal(result, mine().cumsum(0))


def test_what_a_function_raises_is_raised_here(workers):
    with pytest.raises(RuntimeError, match=f"ZeroDivisionError: sync on rank {next_rank()}"):
        rpc.rpc_sync(next_rank(), fail, ("sync",))
    with pytest.raises(RuntimeError, match=f"ZeroDivisionError: async on rank {next_rank()}"):
        rpc.rpc_async(next_rank(), fail, ("async",)).wait()


@pytest.mark.parametrize("kind", ["rpc_sync", "rpc_async"])
def test_an_answer_that_comes_late_is_an_error_that_names_the_rank(workers, kind):
    def call() -> None:
        answer = getattr(rpc, kind)(next_rank(), sleep, (0.6,), timeout=0.2)
        answer.wait()

    with pytest.raises(mpisgd.CollectiveTimeout, match=f"sleep on 'worker{next_rank()}', rank .*0.2 s"):
        call()
    assert rpc.rpc_sync(next_rank(), sleep, (0.6,)) == 0.6


@pytest.mark.parametrize("kind", ["rpc_sync", "rpc_async"])
def test_the_monitor_knows_for_whom_a_call_waits(workers, kind):
    """The function that is called looks at what the caller's thread has registered."""
    waits = rpc.rpc_sync(mpisgd.rank(), registered_waits_of, (kind,))
    assert waits == [(f"{kind} of look_around on 'worker{mpisgd.rank()}'", (mpisgd.rank(),))]


def registered_waits_of(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    answer = getattr(rpc, kind)(mpisgd.rank(), look_around)
    return answer if kind == "rpc_sync" else answer.wait()


def look_around() -> list[tuple[str, tuple[int, ...]]]:
    time.sleep(0.1)
    reasons = [wait.reason() for wait in wait_registry.registered() if wait.reason is not None]
    return [(reason.what, reason.awaited) for reason in reasons if "look_around" in reason.what]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rpc.rpc_sync("nobody", sleep), "rpc_sync: there is no worker 'nobody'; there are worker0"),
        (lambda: rpc.rpc_async(99, sleep), "rpc_async: there is no worker 99"),
        (lambda: rpc.remote(0, "sleep"), "remote: func='sleep'; expected a function"),
    ],
)
def test_mistakes_are_said_before_anything_is_sent(workers, call, said):
    with raises_everywhere(mpisgd.InvalidArgument) as caught:
        call()
    everyone(said in caught.text, caught.text)


def test_a_second_start_is_refused_on_every_rank(workers):
    with raises_everywhere(mpisgd.AlreadyInitialized):
        rpc.init_rpc()


def reduced(value: float) -> float:
    """All ranks are called to do this: a collective in the thread that serves the call."""
    tensor = torch.tensor([value + mpisgd.rank()], dtype=torch.float64)
    mpisgd.all_reduce(tensor)
    return tensor.item()


def test_called_functions_use_collectives(workers):
    if mpisgd.rank() == 0:
        sums = [call.wait() for call in [rpc.rpc_async(name, reduced, (2.0,)) for name in workers]]
        size = mpisgd.size()
        assert sums == [2.0 * size + size * (size - 1) / 2] * size


def test_calls_and_torchs_process_groups_at_the_same_time(workers):
    made_here = not dist.is_initialized()  # the tests of torch_backend keep one for the whole run
    if made_here:
        dist.init_process_group("mpisgd")
    calls = [rpc.rpc_async(name, place_and_sum, (mine(),)) for name in workers for _ in range(5)]
    tensor = mine()
    for _ in range(5):
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        mpisgd.all_reduce(tensor, mpisgd.ReduceOp.AVG)
    results = torch.futures.wait_all(calls)
    if made_here:
        dist.destroy_process_group()
    mean = torch.arange(5.0, dtype=torch.float64) * (mpisgd.size() + 1) / 2
    everyone(torch.allclose(tensor, mean, rtol=0, atol=1e-12), f"{tensor}")
    everyone(all(torch.equal(result, mine().cumsum(0)) for _, result in results))
