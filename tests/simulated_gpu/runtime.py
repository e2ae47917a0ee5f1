"""`SimulatedGpu`: the simulated device as mpisgd sees devices."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import Cuda
from mpisgd.job.job_of_thread import job_place
from simulated_gpu.device import KIND, install
from simulated_gpu.nccl import NcclOptions, SimulatedNccl

__all__ = ["SimulatedGpu"]


class _Opened:
    """What a rank has opened."""

    def __init__(self) -> None:
        self.communicators: list[SimulatedNccl] = []


class SimulatedGpu(Cuda):
    """See `Cuda`.

    Args:
        nccl: whether torch has it.
        shared: whether all ranks of a host have the same GPU.

    Attributes:
        device: the simulation.
    """

    kind = KIND

    def __init__(self, *, nccl: bool = True, shared: bool = False) -> None:
        self.device = install()
        self._nccl, self._shared = nccl, shared

    @property
    def opened(self) -> list[SimulatedNccl]:
        """NCCL's communicators of this rank, in order."""
        return job_place().own(_Opened).communicators

    @property
    def module(self) -> Any:
        return torch.get_device_module(KIND)

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == KIND

    def identity(self, device: torch.device) -> str:
        return f"simulated GPU {0 if self._shared else device.index}"

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.device.pinned(numel, dtype)

    def allow_captures_elsewhere(self) -> None:
        self.device.streams.relaxed.add(threading.get_ident())

    def has_nccl(self) -> bool:
        return self._nccl

    def nccl_options(self) -> NcclOptions:
        return NcclOptions()

    def make_nccl(self, store: Any, rank: int, size: int, options: NcclOptions) -> SimulatedNccl:
        self.opened.append(SimulatedNccl(self.device, store, rank, size, options))
        return self.opened[-1]
