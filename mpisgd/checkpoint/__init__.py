"""Checkpoints: whole or not there, loadable at any number of ranks, without pickle.

    from mpisgd import checkpoint

    start = 0
    if checkpoint.latest("runs/a"):
        start = checkpoint.load("runs/a", model=model, optimizer=optimizer, scheduler=scheduler).step
    ...
    checkpoint.save("runs/a", step, model=model, optimizer=optimizer, scheduler=scheduler, keep_last=3)

`Writer` writes them while training goes on; `on_preemption` saves before a batch system takes the machine
back. For models divided among ranks (FSDP, tensor parallelism, ZeRO) there is torch.distributed.checkpoint.
"""

from mpisgd.checkpoint.loading import Loaded, latest, load
from mpisgd.checkpoint.preemption import Preemption, on_preemption
from mpisgd.checkpoint.saving import save
from mpisgd.checkpoint.writer import Writer

__all__ = ["Loaded", "Preemption", "Writer", "latest", "load", "on_preemption", "save"]
