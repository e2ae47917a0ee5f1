"""A rank uses its own GPU only, in all of its threads: a context on another one costs half a GB there.

A thread begins on GPU 0, whatever its starter's was. So mpisgd's begin on that of who starts them: what names
no GPU, as a program's callback may, would land on GPU 0 otherwise. That is the control, on a thread of
Python's own: its context on GPU 0 must be seen.
"""

from __future__ import annotations

import threading

import torch

import mpisgd
import mpisgd.horovod as hvd
from gpu_checks.finding import Finding, LeftOut
from gpu_checks.gpu import Gpu, everyones
from mpisgd.threads.service_thread import InheritingThread

__all__ = ["own_gpu_only"]


def own_gpu_only(gpu: Gpu) -> Finding:
    """Look for contexts after operations of all kinds, some of them on threads of mpisgd."""
    if gpu.count < 2:
        raise LeftOut("one GPU: there is no other one")
    own = gpu.module.current_device()
    model = torch.nn.Linear(4, 4).to(gpu.kind)
    mpisgd.broadcast_parameters(model)
    optimizer = mpisgd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), overlap=True)
    model(torch.ones(2, 4, device=gpu.kind)).sum().backward()
    optimizer.step()
    mpisgd.all_reduce(gpu.zeros(10), async_op=True).wait()
    mpisgd.all_reduce(gpu.zeros(10), algorithm="mpi", async_op=True).wait()
    _use_a_gpu(gpu, InheritingThread)
    hvd.init()
    hvd.allreduce(gpu.zeros(10))
    hvd.shutdown()
    gpu.synchronize()
    used = [number for number in range(gpu.count) if gpu.has_context(number)]
    _use_a_gpu(gpu, threading.Thread)
    if not all(everyones(gpu.has_context(0))) or not any(everyones(own > 0)):
        raise LeftOut("the control, a plain thread, left no context that was not there without it")
    return Finding.of(
        used == [own],
        f"a context on GPU {own} alone",
        f"on {', '.join(f'GPU {number}' for number in used) or 'none'}",
    )


def _use_a_gpu(gpu: Gpu, kind: type[threading.Thread]) -> None:
    """Make a tensor in a thread that names no GPU."""
    thread = kind(target=lambda: torch.ones(1, device=gpu.kind))
    thread.start()
    thread.join()
