"""A result is used on another stream than that of its operation, by somebody who knows of its future only.

    side     sleep | fill | (all_reduce)
    other                    | wait for the future | read

A future that orders no streams lets `other` read zeros. Beside it stands the control: a read that waits for
nothing must see zeros, or the fill was not late and the check shows nothing.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import mpisgd
from gpu_checks.finding import Finding, LeftOut
from gpu_checks.gpu import Gpu
from mpisgd.torch_backend import bf16_compress

__all__ = ["by_backend", "by_ddp_hook", "by_hook", "by_mpisgd", "by_nccl_of_torch"]

N = 1000


def by_mpisgd(gpu: Gpu) -> Finding:
    """By `mpisgd.all_reduce`."""
    return _used_elsewhere(gpu, lambda tensor: mpisgd.all_reduce(tensor, async_op=True).get_future())


def by_backend(gpu: Gpu) -> Finding:
    """By `torch.distributed` on the backend "mpisgd"."""
    with _process_group("mpisgd"):
        return _used_elsewhere(gpu, _of_torch)


def by_nccl_of_torch(gpu: Gpu) -> Finding:
    """By `torch.distributed` on its own NCCL: the control of the two above."""
    if mpisgd.size() > gpu.count:
        raise LeftOut("NCCL refuses two ranks on one GPU")
    with _process_group(gpu.nccl_backend()):
        return _used_elsewhere(gpu, _of_torch)


class Bucket:
    """DDP's, as far as a hook reads it."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def buffer(self) -> Tensor:
        """The gradients."""
        return self._tensor


def by_hook(gpu: Gpu) -> Finding:
    """By `bf16_compress`, called as DDP calls it."""
    with _process_group("mpisgd"):
        mean = (mpisgd.size() + 1) / 2
        return _used_elsewhere(gpu, lambda tensor: bf16_compress(None, Bucket(tensor)), mean)


def _of_torch(tensor: Tensor) -> Any:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work.get_future()


def _used_elsewhere(gpu: Gpu, begin: Callable[[Tensor], Any], wanted: float | None = None) -> Finding:
    """Read results on another stream, some times.

    Args:
        gpu: to do it on.
        begin: starts an operation and returns its future.
        wanted: its result; by default the sum of rank + 1.
    """
    total = sum(range(1, mpisgd.size() + 1)) if wanted is None else wanted
    begin(gpu.zeros(N)).wait()  # what is opened at the first time may take its time
    gpu.synchronize()
    rounds, wrong, unordered_is_early = 3 if gpu.quick else 10, 0, True
    for _ in range(rounds):
        side, other = gpu.stream(), gpu.stream()
        tensor = gpu.zeros(N)
        gpu.fill_late(tensor, mpisgd.rank() + 1.0, side)
        with gpu.on(other):
            unordered = tensor * 3
        other.synchronize()
        unordered_is_early &= bool((unordered == 0).all())
        with gpu.on(side):
            future = begin(tensor)
        with gpu.on(other):
            result = future.wait()
            seen = (result if isinstance(result, Tensor) else result[0]) * 3
        other.synchronize()
        wrong += bool((seen != 3 * total).any())
        gpu.synchronize()
    if not unordered_is_early:
        raise LeftOut("the control saw the fill, for which it does not wait: it was not late")
    return Finding.of(
        not wrong,
        f"{total:g} on the other stream; the control, which does not wait, sees 0",
        f"right in {rounds - wrong} of {rounds} rounds",
    )


def by_ddp_hook(gpu: Gpu) -> Finding:
    """By DDP on the backend "mpisgd" with the hook `bf16_compress`: forward and backward in a side stream."""
    with _process_group("mpisgd"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 300), nn.Linear(300, 4)).to(gpu.kind)
        second = model[1].weight.detach().clone()
        gpu.synchronize()
        side = gpu.stream()
        with gpu.on(side):
            parallel = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        parallel.register_comm_hook(None, bf16_compress)
        inputs = torch.full((1, 8), mpisgd.rank() + 1.0, device=gpu.kind)
        gpu.synchronize()
        rounds, off = 2 if gpu.quick else 10, 0.0
        for _ in range(rounds):
            with gpu.on(side):
                parallel.zero_grad()
                gpu.sleep()
                parallel(inputs).sum().backward()
                grad = model[0].weight.grad * 1
            side.synchronize()
            mean = (mpisgd.size() + 1) / 2
            wanted = second.sum(0).unsqueeze(1).expand_as(grad) * mean
            off = max(off, float((grad - wanted).norm() / wanted.norm()))
    return Finding.of(
        off < 0.01,
        "gradients are the mean over the ranks, up to 0.01 by rounding to bfloat16",
        f"off by {off:.2g} of their norm at most, in {rounds} rounds",
    )


@contextlib.contextmanager
def _process_group(backend: str) -> Iterator[None]:
    """The default process group on a backend, inside."""
    if backend == "mpisgd":
        dist.init_process_group(backend)
    else:
        file = mpisgd.broadcast_object(tempfile.mktemp(prefix="gpu-check-"))
        dist.init_process_group(
            backend, init_method=f"file://{file}", rank=mpisgd.rank(), world_size=mpisgd.size()
        )
    yield
    dist.destroy_process_group()
