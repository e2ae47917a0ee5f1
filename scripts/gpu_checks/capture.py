"""CUDA graphs and torch.compile: what is not refused by an error of mpisgd must be right."""

from __future__ import annotations

import copy

import torch
from torch import nn

import mpisgd
from gpu_checks.finding import Finding, LeftOut
from gpu_checks.gpu import Gpu

__all__ = ["compiled_model", "operation_in_a_graph"]


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
    """A compiled model trains as one that is not compiled."""
    if gpu.is_simulated:
        raise LeftOut("the simulated device has no compiler")
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).to(gpu.kind)
    trained = []
    for model in (copy.deepcopy(plain), plain):
        forward = torch.compile(model) if model is not plain else model
        optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for step in range(10):
            draw = torch.Generator().manual_seed(10 * step + mpisgd.rank())
            inputs = torch.randn(6, 8, generator=draw).to(gpu.kind)
            optimizer.zero_grad()
            forward(inputs).square().mean().backward()
            optimizer.step()
        trained.append([param.detach() for param in model.parameters()])
    off = max(float((a - b).abs().max()) for a, b in zip(*trained, strict=True))
    return Finding.of(off < 1e-4, "the parameters of a training without, up to 1e-4", f"off by {off:.2g}")
