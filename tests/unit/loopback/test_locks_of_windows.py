"""A window's locks and clocks among ranks that are threads of one process."""

from __future__ import annotations

import torch

import mpisgd
from mpisgd.job.threads_as_ranks import LOST, Loss, lose_ranks, run_ranks
from mpisgd.threads import scheduling


def test_a_lock_keeps_other_ranks_out():
    """The kernel's locks of a process are those of all its threads: two ranks had one at once."""

    def program() -> int:
        window, ways = mpisgd.Window(torch.zeros(1, dtype=torch.int64)), []
        for _ in range(5):
            with window.locked(0):
                memory = window.local(0)
                before = int(memory)
                ways.append(before)
                scheduling.sleep(0.001)
                memory[0] = before + 1
        mpisgd.barrier()
        return int(window.local(0))

    for seed in range(10):
        assert run_ranks(3, program, seed=seed) == [15] * 3


def test_ranks_see_who_lives_and_take_the_lock_of_one_that_was_lost():
    def program() -> tuple[list[bool], int]:
        window = mpisgd.Window(torch.zeros(1))
        alive = [window.is_alive(rank) for rank in range(3)]
        if mpisgd.rank() == 1:
            window.lock(0)
            scheduling.sleep(1.0)
            lose_ranks(1)
        while window.is_alive(1):
            scheduling.sleep(0.1)
        assert all(alive)
        lost = window.lock(0)
        window.unlock(0)
        return lost

    for seed in range(5):
        found = run_ranks(3, program, seed=seed, losses=[], limit_s=20.0)
        assert found[1] is LOST
        assert sorted([found[0], found[2]]) == [-1, 1]  # whoever is first is told


def test_a_worker_that_is_too_far_ahead_waits():
    """Every other rank was taken to be lost, and the bound counted for nothing."""

    def program() -> int:
        param = torch.nn.Parameter(torch.zeros(2))
        optimizer = mpisgd.DistributedOptimizer(
            torch.optim.SGD([param], lr=0.5), strategy=mpisgd.ParameterServer("ssp", staleness_steps=1)
        )
        for _ in range(6):
            scheduling.sleep(0.1 * mpisgd.rank())
            param.grad = torch.ones(2)
            optimizer.step()
        optimizer.synchronizer.finish()
        return max(optimizer.synchronizer.counters().lead)

    assert max(run_ranks(3, program)) == 1


def test_workers_go_on_without_one_that_is_lost_with_a_lock():
    def program() -> list[float]:
        param = torch.nn.Parameter(torch.zeros(2))

        class Slow(torch.optim.SGD):
            def step(self, closure=None):
                scheduling.sleep(0.001)
                super().step(closure)

        optimizer = mpisgd.DistributedOptimizer(
            Slow([param], lr=1.0),
            strategy=mpisgd.ParameterServer("ssp", staleness_steps=1),
            op=mpisgd.ReduceOp.SUM,
        )
        for _ in range(6):
            param.grad = torch.ones(2)
            scheduling.sleep(0.001)
            optimizer.step()
        optimizer.synchronizer.finish()
        return param.tolist()

    seen = set()
    for at in range(24, 44):
        found = run_ranks(3, program, seed=at, losses=[Loss((2,), at)], limit_s=20.0)
        if found[2] is LOST and not any(isinstance(one, mpisgd.PeerLost) for one in found):
            assert found[0] == found[1]
            seen.add(-found[0][0])
    assert seen <= set(range(12, 19))
    assert seen
