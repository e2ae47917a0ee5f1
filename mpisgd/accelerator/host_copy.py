"""Copies of nested state, in host memory that is used again: a copy costs one pass over the tensors."""

import copy
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import on_device, runtime

__all__ = ["copy_tree"]


def copy_tree(source: Any, into: Any = None) -> Any:
    """Return a copy of `source` on the host, made in the memory of `into` where that fits.

    Args:
        source: dicts, lists and tuples of tensors and of whatever can be deep-copied.
        into: an earlier copy that is not needed any more; its tensors are overwritten.

    Cost: one pass over the memory; from devices, into pinned memory, all copies in flight at once.
    """
    devices: set[torch.device] = set()
    copied = _copy(source, into, devices)
    for device in devices:
        runtime().current_stream(device).record_event().synchronize()
    return copied


def _copy(source: Any, into: Any, devices: set[torch.device]) -> Any:
    """Copy; the copies of tensors on `devices`, which is added to, are only begun."""
    if isinstance(source, Tensor):
        return _copy_tensor(source.detach(), into, devices)
    if isinstance(source, dict):
        earlier = into if isinstance(into, dict) else {}
        copies = {key: _copy(value, earlier.get(key), devices) for key, value in source.items()}
        made = copy.copy(source)  # of its kind: an ordered dict, with torch's metadata
        made.update(copies)
        return made
    if type(source) in (list, tuple):
        known = into if isinstance(into, type(source)) and len(into) == len(source) else [None] * len(source)
        return type(source)(_copy(value, old, devices) for value, old in zip(source, known, strict=True))
    return copy.deepcopy(source)


def _copy_tensor(source: Tensor, into: Any, devices: set[torch.device]) -> Tensor:
    if source.layout != torch.strided:
        return source.cpu().clone()
    fits = isinstance(into, Tensor) and (into.shape, into.dtype) == (source.shape, source.dtype)
    if not on_device(source):
        room = into if fits else torch.empty(source.shape, dtype=source.dtype)
        return room.copy_(source)
    room = into if fits else runtime().pinned(source.numel(), source.dtype).view(source.shape)
    devices.add(source.device)
    runtime().copy(room, source.resolve_conj().resolve_neg())
    return room
