"""torch.distributed on gloo or NCCL, in a process of its own beside each rank."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from mpisgd.tools.bench.measure import Timed, Unavailable, Variant
from mpisgd.tools.bench.network import interface_to
from mpisgd.tools.bench.payload import Payload, torch_call
from mpisgd.tools.bench.peers.framework import JOIN_LIMIT_S, Rendezvous
from mpisgd.tools.bench.torch_parallel import torch_step
from mpisgd.tools.bench.training import StepTask

__all__ = ["Gloo", "Nccl"]


class Gloo:
    """See `Framework`."""

    version = f"torch {torch.__version__}"
    backend = "gloo"

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.check_available()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface_to(rendezvous.address).name)
        dist.init_process_group(
            self.backend,
            store=rendezvous.store(),
            rank=rendezvous.topology.rank,
            world_size=rendezvous.topology.size,
            timeout=timedelta(seconds=JOIN_LIMIT_S),
        )

    def check_available(self) -> None:
        """Raise Unavailable where this torch has none."""
        if not (dist.is_available() and dist.is_gloo_available()):
            raise Unavailable("this torch is built without gloo")

    def make(self, task: Any) -> Variant:
        """See `Framework`."""
        if isinstance(task, StepTask):
            return torch_step("torch", task)
        payload = Payload(task, dist.get_rank())
        return Timed(self.backend, torch_call(dist, payload, range(task.size)), payload, start=dist.barrier)


class Nccl(Gloo):
    """The same on NCCL, for tensors on a GPU."""

    backend = "nccl"

    def check_available(self) -> None:
        """Raise Unavailable where there is none: no NCCL, or no GPU."""
        if not (dist.is_available() and dist.is_nccl_available()):
            raise Unavailable("this torch is built without NCCL")
        if not torch.cuda.is_available():
            raise Unavailable("torch sees no GPU")
