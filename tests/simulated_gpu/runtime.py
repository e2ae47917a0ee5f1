"""`SimulatedGpu`: the simulated device as mpisgd sees devices."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import Cuda
from simulated_gpu.device import KIND, install
from simulated_gpu.nccl import SimulatedNccl

__all__ = ["SimulatedGpu"]


class SimulatedGpu(Cuda):
    """See `Cuda`.

    Args:
        nccl: whether torch has it.
        shared: whether all ranks of a host have the same GPU.

    Attributes:
        device: the simulation.
        opened: NCCL's communicators, in order.
    """

    kind = KIND

    def __init__(self, *, nccl: bool = True, shared: bool = False) -> None:
        self.device = install()
        self.opened: list[SimulatedNccl] = []
        self._nccl, self._shared = nccl, shared

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == KIND

    def take_device(self, local_rank: int) -> None:
        if not self._shared:
            self.device.set_current(local_rank % self.device.num_devices)

    def memory_in_use(self) -> int:
        return self.device.allocator.allocated[self.device.current()]

    def identity(self, device: torch.device) -> str:
        return f"simulated GPU {0 if self._shared else device.index}"

    def current_stream(self, device: torch.device) -> Any:
        return torch.accelerator.current_stream(device)

    def new_stream(self, device: torch.device) -> Any:
        return torch.Stream(device)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return stream

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        return self.device.pinned(numel, dtype)

    def has_nccl(self) -> bool:
        return self._nccl

    def open_nccl(self, store: Any, rank: int, size: int, timeout_s: float) -> SimulatedNccl:
        self.opened.append(SimulatedNccl(self.device, store, rank, size, timeout_s))
        return self.opened[-1]
