"""`prefetch_to_host`: device tensors come to the host one after the other, while it works on those before.

device    copy 0 | copy 1 | copy 2 | ...
host               | use 0    | use 1    | use 2 ...
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import on_host
from mpisgd.accelerator.own_streams import OwnStreams
from mpisgd.accelerator.runtime import on_device, runtime

__all__ = ["AHEAD_BYTES", "prefetch_to_host"]

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
