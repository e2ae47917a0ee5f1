"""Atomic, checksummed, pickle-free checkpoints, loadable at any number of ranks.

    from mpisgd import checkpoint

    start = 0
    if checkpoint.latest("runs/a"):
        start = checkpoint.load("runs/a", model=model, optimizer=optimizer, scheduler=scheduler).step
    ...
    checkpoint.save("runs/a", step, model=model, optimizer=optimizer, scheduler=scheduler, keep_last=3)

`Writer` writes them in the background; `on_preemption` tells a program to save before a batch system ends it.
For models sharded over ranks (FSDP, tensor parallelism, ZeRO) use torch.distributed.checkpoint.
"""

from mpisgd.checkpoint.loading import Loaded, latest, load
from mpisgd.checkpoint.preemption import Preemption, on_preemption
from mpisgd.checkpoint.saving import save
from mpisgd.checkpoint.writer import Writer

__all__ = ["Loaded", "Preemption", "Writer", "latest", "load", "on_preemption", "save"]
