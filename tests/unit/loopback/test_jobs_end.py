"""Nothing holds a job whose ranks have ended: what knows a group would keep all that was made for it."""

import gc
import weakref

import pytest
import torch
from torch import nn

import mpisgd
from mpisgd.job.lifecycle import current_job
from mpisgd.job.threads_as_ranks import run_ranks


def train(**options):
    model = nn.Linear(3, 2)
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    return optimizer, step


def plain() -> None:
    train()[1]()


def compressed_between_hosts() -> None:
    train(compression=mpisgd.compress.PerHost(mpisgd.compress.TopK(ratio=0.5)))[1]()


def uneven() -> None:
    optimizer, step = train()
    with optimizer.join():
        for _ in range(1 + mpisgd.rank()):
            step()


def of_some_ranks() -> None:
    group = mpisgd.new_group([0, 1, 2])
    train(group=group, compression=mpisgd.compress.PerHost(mpisgd.compress.TopK(ratio=0.5)))[1]()


@pytest.mark.parametrize("program", [plain, compressed_between_hosts, uneven, of_some_ranks])
def test_a_job_is_gone_after_its_ranks_have_ended(program):
    jobs = []

    def body() -> None:
        jobs.append(weakref.ref(current_job()))
        program()

    run_ranks(3, body, ranks_per_host=[2, 1])
    gc.collect()
    assert [job() for job in jobs] == [None] * 3


def test_an_optimizer_is_gone_after_a_join():
    """Another rank counts it among those that a backward may reach as long as it is there."""

    def body() -> bool:
        optimizer, step = train()
        with optimizer.join():
            step()
        reference = weakref.ref(optimizer)
        del optimizer, step
        gc.collect()
        return reference() is None

    assert run_ranks(2, body) == [True, True]
