"""Copies on the host: of nested state, in memory that is used again, and of tensors one after the other.

`prefetch_to_host` lets device tensors come to the host while it works on those before:

    device    copy 0 | copy 1 | copy 2 | ...
    host               | use 0    | use 1    | use 2 ...
"""

import copy
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import on_host
from mpisgd.accelerator.own_streams import OwnStreams
from mpisgd.accelerator.runtime import on_device, runtime

__all__ = ["AHEAD_BYTES", "copy_tree", "prefetch_to_host"]


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


AHEAD_BYTES = 64 * 2**20  # that are copied, at most, before the host asks for them


def prefetch_to_host(tensors: Iterable[Tensor], streams: OwnStreams) -> Iterator[Tensor]:
    """Yield tensors in their order, each as soon as the host can read it: itself, or a copy in pinned memory.

    What was queued on the current stream before comes before the copies, which have a stream of their own.

    Args:
        tensors: that exist already, and stay until the last one was yielded.
        streams: where that of each device is kept.
    """
    begun: dict[torch.device, torch.cuda.Stream] = {}
    under_way: deque[tuple[Tensor, Any]] = deque()
    num_bytes = 0
    for tensor in tensors:
        under_way.append(_begin(tensor, begun, streams))
        num_bytes += _copied_bytes(*under_way[-1])
        while under_way and num_bytes > AHEAD_BYTES:
            num_bytes -= _copied_bytes(*under_way[0])
            yield _arrived(*under_way.popleft())
    while under_way:
        yield _arrived(*under_way.popleft())


def _begin(
    tensor: Tensor, begun: dict[torch.device, torch.cuda.Stream], streams: OwnStreams
) -> tuple[Tensor, Any]:
    """Begin to copy a tensor; return the copy, and the event when it is complete."""
    if not on_device(tensor) or tensor.is_sparse:
        return on_host(tensor), None
    if tensor.device not in begun:
        begun[tensor.device] = streams.get("host prefetch", tensor.device)
        begun[tensor.device].wait_event(runtime().current_stream(tensor.device).record_event())
    there = runtime().pinned(tensor.numel(), tensor.dtype).view(tensor.shape)
    with runtime().on(begun[tensor.device]):
        runtime().copy(there, tensor.detach())
    return there, begun[tensor.device].record_event()


def _copied_bytes(there: Tensor, event: Any) -> int:
    return 0 if event is None else there.nbytes


def _arrived(there: Tensor, event: Any) -> Tensor:
    if event is not None:
        event.synchronize()
    return there
