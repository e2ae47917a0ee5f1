"""What a step of a large model takes beside the same step without mpisgd: time, memory, waits of the host."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import mpisgd
from gpu_checks.finding import Finding
from gpu_checks.gpu import Gpu
from mpisgd.job.lifecycle import current_job

__all__ = ["large_model"]

LAYERS, WIDTH, BATCH = 8, 5792, 256  # 1 GiB of float32
SMALL_WIDTH = 64
WARM_UP, ROUNDS, STEPS = 3, 10, 5
MAX_RATIO = 1.03
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
COPIES = ("Memcpy DtoH", "Memcpy HtoD")


def large_model(gpu: Gpu) -> Finding:
    """Steps in turns; by NCCL the host must not wait for the GPU, and alone it must cost little."""
    plain = _Steps(gpu, lambda optimizer: optimizer)
    ours = _Steps(gpu, lambda optimizer: mpisgd.DistributedOptimizer(optimizer))
    ratio = _ratio(gpu, plain, ours)
    figures = {"ratio to the step without mpisgd": ratio, "step ms": ours.seconds * 1e3}
    figures |= {"memory MiB": ours.mib, "memory MiB without mpisgd": plain.mib}
    waits, copies = (b - a for a, b in zip(_host_work(gpu, plain), _host_work(gpu, ours), strict=True))
    figures |= {"host waits per step": waits, "copies from and to the host per step": copies}
    by_nccl = current_job().gpu != "mpi" and mpisgd.local_size() <= gpu.count
    is_timed = by_nccl and mpisgd.size() == 1 and not gpu.is_simulated
    expected = ["no wait of the host for the GPU, no copy"] if by_nccl else ["figures only"]
    expected += [f"at most {MAX_RATIO:g} times the step without mpisgd"] * is_timed
    holds = not by_nccl or (waits <= 0 and copies <= 0)
    return Finding.of(
        holds and (not is_timed or ratio <= MAX_RATIO),
        "; ".join(expected),
        f"{ratio:.3f} times the step without mpisgd; per step {waits:g} waits and {copies:g} copies more "
        f"than without; {ours.mib:.0f} MiB of memory, without {plain.mib:.0f}",
        **figures,
    )


class _Steps:
    """A model and its steps.

    Attributes:
        mib: memory that its steps took at most.
        seconds: median of a step, once it was timed.
    """

    def __init__(self, gpu: Gpu, wrapped: Callable[[torch.optim.Optimizer], torch.optim.Optimizer]) -> None:
        self._gpu, self.seconds = gpu, 0.0
        width = SMALL_WIDTH if gpu.quick or gpu.is_simulated else WIDTH
        before = gpu.memory_in_use()
        torch.manual_seed(1)
        with torch.device(gpu.kind):
            self.model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))
            self._inputs = torch.ones(BATCH, width)
        self._optimizer = wrapped(torch.optim.SGD(self.model.parameters(), lr=1e-6))
        if not gpu.is_simulated:
            gpu.module.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            self.step()
        gpu.synchronize()
        most = gpu.memory_in_use() if gpu.is_simulated else gpu.module.max_memory_allocated()
        self.mib = (most - before) / 2**20

    def step(self) -> None:
        """Train once."""
        self._optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self._optimizer.step()

    def time(self) -> float:
        """Seconds of a step."""
        self._gpu.synchronize()
        mpisgd.barrier()
        begun = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        self._gpu.synchronize()
        return (time.perf_counter() - begun) / STEPS


def _ratio(gpu: Gpu, plain: _Steps, ours: _Steps) -> float:
    """How many times the median step takes, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(2 if gpu.quick else ROUNDS):
        for steps, seconds in zip((plain, ours), times, strict=True):
            seconds.append(steps.time())
    plain.seconds, ours.seconds = map(statistics.median, times)
    return ours.seconds / plain.seconds


def _host_work(gpu: Gpu, steps: _Steps) -> tuple[float, float]:
    """How often the host waits for the GPU in a step, and how many copies there are between them."""
    gpu.synchronize()
    with _counted(gpu) as counts:
        for _ in range(STEPS):
            steps.step()
    return counts["waits"] / STEPS, counts["copies"] / STEPS


@contextlib.contextmanager
def _counted(gpu: Gpu) -> Iterator[dict[str, int]]:
    """Counts of waits and copies inside, filled at the end."""
    counts = {"waits": 0, "copies": 0}
    if gpu.is_simulated:
        with _simulated_counts(gpu, counts):
            yield counts
        return
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        yield counts
    for event in found.events():
        counts["waits"] += event.name in WAITS
        counts["copies"] += event.name.startswith(COPIES)


@contextlib.contextmanager
def _simulated_counts(gpu: Gpu, counts: dict[str, int]) -> Iterator[None]:
    """Count what the simulated device is asked to wait for, and what mpisgd copies."""
    from mpisgd.accelerator.runtime import runtime

    streams, copy = gpu.module.device.streams, runtime().copy
    wait = streams.synchronize

    def counted_wait(event: Any) -> None:
        counts["waits"] += 1
        wait(event)

    def counted_copy(*pair: Any) -> None:
        counts["copies"] += 1
        copy(*pair)

    streams.synchronize, runtime().copy = counted_wait, counted_copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        del streams.synchronize, runtime().copy
