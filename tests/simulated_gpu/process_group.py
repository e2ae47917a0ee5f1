"""torch's own process groups on the simulated NCCL, as far as `gpu_check` compares mpisgd with them."""

from __future__ import annotations

import datetime
from typing import Any

import torch.distributed as dist

from simulated_gpu.device import KIND, install
from simulated_gpu.nccl import NcclOptions, SimulatedNccl, SimulatedWork

__all__ = ["BACKEND", "register"]

BACKEND = "simulated-nccl"


class _ProcessGroup(dist.ProcessGroup):
    def __init__(self, store: Any, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        options = NcclOptions()
        options._timeout = timeout  # type: ignore[attr-defined]
        self._nccl = SimulatedNccl(install(), store, rank, size, options)

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Any, opts: Any) -> SimulatedWork:
        return self._nccl.allreduce(tensors, opts)

    def shutdown(self) -> None:
        self._nccl.shutdown()


def register() -> str:
    """Make it known to torch; return its name."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _ProcessGroup, devices=[KIND])
    return BACKEND
