"""`Memory`: where this rank's operations work: what is kept from one to the next, and on which device."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mpisgd.horovod.engine.entry import Entry
from mpisgd.horovod.engine.request import Request

__all__ = ["Memory"]


class Memory:
    """Used by one thread at a time."""

    def __init__(self) -> None:
        self._kept: dict[torch.dtype, Tensor] = {}
        self._devices: dict[str, torch.device] = {}

    def room(self, dtype: torch.dtype, numel: int) -> Tensor:
        """Return memory [numel] of the CPU for what travels together, kept from one time to the next."""
        kept = self._kept.get(dtype)
        if kept is None or kept.numel() < numel:
            kept = self._kept[dtype] = torch.empty(numel, dtype=dtype)
        return kept[:numel]

    def device_of(self, request: Request, entries: Sequence[Entry | None]) -> torch.device:
        """Return where the tensors of an operation lie, or would, on a rank that has joined.

        The engine's thread has a current device of its own, so the one that was used before is remembered.
        """
        for entry in entries:
            if entry is not None and entry.inputs:
                self._devices[request.device] = entry.inputs[0].device
                break
        return self._devices.get(request.device, torch.device(request.device))
