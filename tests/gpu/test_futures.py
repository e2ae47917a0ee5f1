"""The future of an operation is used on any stream, and the host need not wait for that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_under_test import DEVICE, gpu
from late_tensors import CYCLES, N, late_ones, total
from torch import Tensor, nn

import mpisgd
from mpisgd.torch_backend import bf16_compress
from mpisgd.torch_backend.work import BackendWork


@pytest.fixture
def backend() -> Iterator[None]:
    dist.init_process_group("mpisgd")
    yield
    dist.destroy_process_group()


def used_elsewhere(future: Any) -> Tensor:
    """What a stream sees that knows of the future only."""
    other = gpu.Stream()
    with gpu.stream(other):
        result = future.wait()
        seen = (result if isinstance(result, Tensor) else result[0]) * 3
    other.synchronize()
    return seen


def test_the_future_of_an_operation_is_used_on_another_stream():
    side = gpu.Stream()
    tensor = late_ones(side)
    with gpu.stream(side):
        future = mpisgd.all_reduce(tensor, async_op=True).get_future()
    assert (used_elsewhere(future) == 3 * total()).all()


def test_what_follows_a_future_comes_after_the_operation():
    side = gpu.Stream()
    strided = torch.zeros(N, 2, device=DEVICE)[:, 1]  # it is copied back when it is over
    gpu.synchronize()
    with gpu.stream(side):
        gpu._sleep(CYCLES)
        strided.fill_(mpisgd.rank() + 1.0)
        future = mpisgd.all_reduce(strided, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    assert (used_elsewhere(doubled) == 3 * 2 * total()).all()
    assert (used_elsewhere(future) == 3 * total()).all()


def test_to_ask_for_a_future_lets_the_stream_go_on(simulated):
    """Only who waits for it waits."""
    side = gpu.Stream()
    tensor, order = late_ones(side), torch.zeros(1, device=DEVICE)
    with gpu.stream(side):
        work = mpisgd.all_reduce(tensor, async_op=True)
    work.get_future()
    order += 1
    gpu.current_stream().synchronize()
    if simulated.opened:
        assert not work.is_completed()
    work.wait()
    assert (tensor == total()).all()


@pytest.mark.processes
def test_the_future_of_the_backend_is_used_on_another_stream(backend):
    side = gpu.Stream()
    tensor = late_ones(side)
    with gpu.stream(side):
        future = dist.all_reduce(tensor, async_op=True).get_future()
    assert (used_elsewhere(future) == 3 * total()).all()


@pytest.mark.processes
def test_the_future_of_several_operations_of_the_backend_is_used_on_another_stream(backend):
    side = gpu.Stream()
    tensors = [late_ones(side), late_ones(side)]
    with gpu.stream(side):
        with dist._coalescing_manager(async_ops=True) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        futures = [work.get_future() for work in manager.works]
    other = gpu.Stream()
    with gpu.stream(other):
        for future in futures:
            future.wait()
        seen = torch.stack(tensors)
    other.synchronize()
    assert (seen == total()).all()


def test_one_future_of_several_operations_is_used_on_another_stream():
    """As of a group of operations of torch's that stand for one."""
    side, other = gpu.Stream(), gpu.Stream()
    tensors = [late_ones(side), late_ones(side)]
    with gpu.stream(side):
        works = [mpisgd.all_reduce(tensor, async_op=True) for tensor in tensors]
        future = BackendWork(works, tensors).get_future()
    with gpu.stream(other):
        seen = torch.stack(future.wait()) * 3
    other.synchronize()
    assert (seen == 3 * total()).all()


class Bucket:
    """DDP's, as far as a hook reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def buffer(self) -> Tensor:
        return self._tensor


@pytest.mark.processes
def test_a_communication_hook_is_used_on_another_stream(backend):
    side = gpu.Stream()
    tensor = late_ones(side)
    with gpu.stream(side):
        future = bf16_compress(None, Bucket(tensor))
    mean = total() / mpisgd.size()
    assert (used_elsewhere(future) == 3 * mean).all()


@pytest.mark.processes
@pytest.mark.parametrize("hook", [None, bf16_compress], ids=["plain", "bf16"])
def test_data_parallel_reads_no_bucket_in_flight(backend, hook):
    """Backward in a stream of the program's own, the optimizer in it, too."""
    side = gpu.Stream()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 4)).to(DEVICE)
    alone = [param.detach().clone() for param in model.parameters()]
    gpu.synchronize()
    with gpu.stream(side):
        parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    if hook is not None:
        parallel.register_comm_hook(None, hook)
    gpu.synchronize()
    with gpu.stream(side):
        gpu._sleep(CYCLES)
        parallel(torch.full((1, 8), mpisgd.rank() + 1.0, device=DEVICE)).sum().backward()
        grads = [param.grad * 1 for param in model.parameters()]
    side.synchronize()
    mean = total() / mpisgd.size()
    first, second = alone[0], alone[2]
    expected = second.sum(0).unsqueeze(1).expand_as(first) * mean
    tol = 2e-2 if hook else 1e-5
    torch.testing.assert_close(grads[0], expected, rtol=tol, atol=tol)
    torch.testing.assert_close(grads[3], torch.ones_like(grads[3]), rtol=tol, atol=tol)
