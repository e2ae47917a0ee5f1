"""A rank uses its own GPU only, in all of its threads: a context on another one costs half a GB there.

A thread begins on GPU 0, whatever its starter's was. So mpisgd's begin on that of who starts them: what names
no GPU, as a program's callback may, would land on GPU 0 otherwise.
"""

from __future__ import annotations

import torch

import mpisgd
import mpisgd.horovod as hvd
from gpu_checks.finding import Finding, LeftOut
from gpu_checks.gpu import Gpu
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
    thread = InheritingThread(target=lambda: torch.ones(1, device=gpu.kind))
    thread.start()
    thread.join()
    hvd.init()
    hvd.allreduce(gpu.zeros(10))
    hvd.shutdown()
    gpu.synchronize()
    used = [number for number in range(gpu.count) if gpu.has_context(number)]
    return Finding.of(
        used == [own],
        f"a context on GPU {own} alone",
        f"on {', '.join(f'GPU {number}' for number in used) or 'none'}",
    )
