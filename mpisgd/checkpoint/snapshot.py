"""Copies of tensors in memory of the CPU that is used again for the next copies."""

from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["Snapshot"]


class Snapshot:
    """Room for one copy of a training state; made at the first `take`, the same from then on."""

    def __init__(self) -> None:
        self._room: dict[str, Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies, contiguous and of the CPU; those returned before are overwritten.

        Cost: one pass over the memory; from GPUs, into pinned memory, all copies under way at once.
        """
        for name in self._room.keys() - tensors.keys():
            del self._room[name]
        devices = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        with torch.no_grad():
            for name, tensor in tensors.items():
                self._room_for(name, tensor).copy_(tensor, non_blocking=tensor.is_cuda)
        for device in devices:
            torch.cuda.synchronize(device)
        return dict(self._room)

    def _room_for(self, name: str, tensor: Tensor) -> Tensor:
        room = self._room.get(name)
        if room is None or room.shape != tensor.shape or room.dtype != tensor.dtype:
            room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self._room[name] = room
        return room
