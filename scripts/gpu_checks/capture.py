"""CUDA graphs and torch.compile: what is not refused by an error of mpisgd must be right."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor, nn

import mpisgd
from gpu_checks.finding import Finding, LeftOut
from gpu_checks.gpu import Gpu

__all__ = ["compiled_model", "operation_in_a_graph"]

TOLERANCE = 1e-4  # of float32, in kernels that a compiler has joined


def operation_in_a_graph(gpu: Gpu) -> Finding:
    """Capture an all_reduce in a CUDA graph, and replay it."""
    if not hasattr(gpu.module, "CUDAGraph"):
        raise LeftOut("the simulated device has no graphs")
    expected = "an error of mpisgd, or the right sum at every replay"
    total = sum(range(1, mpisgd.size() + 1))
    tensor = gpu.zeros(1000)
    mpisgd.all_reduce(tensor)
    graph = gpu.module.CUDAGraph()
    try:
        with gpu.module.graph(graph):
            mpisgd.all_reduce(tensor)
    except mpisgd.MpisgdError as exc:
        return Finding.of(True, expected, f"{type(exc).__name__}: {exc}")
    except RuntimeError as exc:
        return Finding.of(False, expected, f"{type(exc).__name__}: {exc}")
    found = []
    for _ in range(2):
        tensor.fill_(mpisgd.rank() + 1.0)
        graph.replay()
        found.append(float(tensor.max()))
    return Finding.of(found == [total] * 2, expected, f"{found}")


def compiled_model(gpu: Gpu) -> Finding:
    """A compiled model trains as one process does; a compiled function stops at an operation, and goes on.

    The simulated device has no compiler: its graphs are taken, and run as they are.
    """
    compiled = functools.partial(torch.compile, backend="eager" if gpu.is_simulated else "inductor")
    rank, size, steps = mpisgd.rank(), mpisgd.size(), 3 if gpu.quick else 10
    torch.manual_seed(3)
    alone = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).to(gpu.kind)
    ours = copy.deepcopy(alone)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1))
    forward = compiled(ours)
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        inputs = torch.randn(6 * size, 8, generator=draw).to(gpu.kind)
        for call, opt, rows in ((alone, plain, inputs), (forward, optimizer, inputs.chunk(size)[rank])):
            opt.zero_grad()
            call(rows).square().mean().backward()
            opt.step()
    pairs = zip(alone.parameters(), ours.parameters(), strict=True)
    off = max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
    found = float(compiled(_doubled_sum)(gpu.zeros(100) + (rank + 1.0)).max())
    total = size * (size + 1) + 1.0
    return Finding.of(
        off < TOLERANCE and found == total,
        f"after {steps} steps the parameters of one process, up to {TOLERANCE:g}; {total:g} of a function",
        f"off by {off:.2g}; {found:g}",
    )


def _doubled_sum(tensor: Tensor) -> Tensor:
    """Twice the sum of all ranks, and one more."""
    doubled = tensor * 2
    _add_up(doubled)
    return doubled + 1


@torch.compiler.disable
def _add_up(tensor: Tensor) -> None:
    mpisgd.all_reduce(tensor)
