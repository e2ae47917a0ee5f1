"""Horovod's operations and optimizer on tensors of a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from gpu_under_test import DEVICE, gpu
from torch import nn

import mpisgd.horovod as hvd


@pytest.fixture(scope="module", autouse=True)
def horovod(job):
    hvd.init()
    yield
    hvd.shutdown()


def given(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel()), device=DEVICE).view(shape) + 100 * rank


def test_operations():
    rank, size = hvd.rank(), hvd.size()
    everyones = [given(r, size, 2) for r in range(size)]
    mine = everyones[rank]
    results = {
        "allreduce": (hvd.allreduce(mine, op=hvd.Sum), sum(everyones)),
        "grouped": (hvd.grouped_allreduce([mine, mine[0]])[1], sum(everyones)[0] / size),
        "allgather": (
            hvd.allgather(mine[: rank + 1]),
            torch.cat([x[: r + 1] for r, x in enumerate(everyones)]),
        ),
        "broadcast": (hvd.broadcast(mine, size - 1), everyones[-1]),
        "reducescatter": (hvd.reducescatter(mine, op=hvd.Sum), sum(everyones)[rank : rank + 1]),
        "alltoall": (hvd.alltoall(mine), torch.stack([x[rank] for x in everyones])),
    }
    for name, (result, wanted) in results.items():
        assert result.device.type == DEVICE, name
        torch.testing.assert_close(result, wanted, msg=name)


def test_what_a_stream_of_the_program_produces_is_waited_for():
    stream = gpu.Stream()
    x = torch.zeros(2**20, device=DEVICE)
    stream.wait_stream(gpu.current_stream())
    with gpu.stream(stream):
        gpu._sleep(50_000_000)
        x.fill_(1.0)
        handle = hvd.allreduce_async_(x, op=hvd.Sum)
        while not hvd.poll(handle):
            pass
        total = hvd.synchronize(handle).clone()
    stream.synchronize()
    assert total.eq(hvd.size()).all()


@pytest.mark.parametrize(("compression", "tol"), [("none", 1e-11), ("bf16", 5e-2)])
def test_training_equals_one_process_on_the_joined_batch(compression, tol):
    torch.manual_seed(5)
    alone = nn.Sequential(nn.Linear(4, 300), nn.Tanh(), nn.Linear(300, 500), nn.Tanh(), nn.Linear(500, 2))
    alone.double().to(DEVICE)
    ours = copy.deepcopy(alone)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    opt = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    compression = getattr(hvd.Compression, compression)
    opt = hvd.DistributedOptimizer(opt, named_parameters=ours.named_parameters(), compression=compression)
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        x = torch.randn(12 * hvd.size(), 4, generator=draw, dtype=torch.float64).to(DEVICE)
        for model, optimizer, rows in ((alone, plain, x), (ours, opt, x.chunk(hvd.size())[hvd.rank()])):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tol, atol=tol)
    hvd.join()


@pytest.mark.mpi(min_size=2)
def test_join():
    if hvd.rank() < hvd.size() - 1:
        total = hvd.allreduce(torch.ones(3, device=DEVICE), op=hvd.Sum)
        assert total.tolist() == [hvd.size() - 1.0] * 3
        assert hvd.allreduce(torch.ones(3, device=DEVICE), op=hvd.Product).tolist() == [1.0] * 3
    hvd.join()
