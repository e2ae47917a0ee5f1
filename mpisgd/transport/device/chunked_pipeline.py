"""A long device tensor through host memory, in chunks: copies go on while another chunk is being reduced.

    down   copy 0 | copy 1   | copy 2   | copy 3   |          device to host
    host          | reduce 0 | reduce 1 | reduce 2 | ...
    up                       | copy 0   | copy 1   | ...      host to device

Three pieces of pinned memory are used in turn, so that what comes down never overtakes what has to go up.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from mpisgd.accelerator.bounce_buffers import CHUNK_BYTES
from mpisgd.accelerator.own_streams import OwnStreams
from mpisgd.accelerator.runtime import on_device, runtime

__all__ = ["CHUNK_BYTES", "goes_in_chunks", "reduce_in_chunks"]

SLOTS = 3


def goes_in_chunks(tensor: Tensor) -> bool:
    """Return whether a tensor lies on a device and is long enough to be cut."""
    return on_device(tensor) and tensor.numel() * tensor.element_size() >= 2 * CHUNK_BYTES


def reduce_in_chunks(flat: Tensor, reduce: Callable[[Tensor], None], streams: OwnStreams) -> None:
    """Replace `flat` by what `reduce` makes of it, chunk by chunk, in order.

    Args:
        flat: contiguous [n] on a device; the current stream is where it comes from and where it is used.
        reduce: changes a chunk in place, in host memory.
        streams: of the group's own.
    """
    chunks = torch.split(flat, CHUNK_BYTES // flat.element_size())
    line = _Line(flat, chunks[0].numel(), streams)
    arriving = line.down(0, chunks[0])
    for number, chunk in enumerate(chunks):
        arrived = arriving
        if number + 1 < len(chunks):
            arriving = line.down(number + 1, chunks[number + 1])
        arrived.synchronize()
        reduce(line.slot(number, chunk))
        line.up(number, chunk)
    line.join()


class _Line:
    """The two directions, and the memory between them."""

    def __init__(self, flat: Tensor, numel: int, streams: OwnStreams) -> None:
        self._current = runtime().current_stream(flat.device)
        self._down, self._up = streams.get("chunks down", flat.device), streams.get("chunks up", flat.device)
        self._slots = [runtime().pinned(numel, flat.dtype) for _ in range(SLOTS)]
        # When each slot has been free, at first: when there is something to copy down.
        self._sent = [self._current.record_event()] * SLOTS

    def slot(self, number: int, chunk: Tensor) -> Tensor:
        return self._slots[number % SLOTS][: chunk.numel()]

    def down(self, number: int, chunk: Tensor) -> torch.cuda.Event:
        """Begin to copy a chunk to the host; the event is when it is there."""
        self._down.wait_event(self._sent[number % SLOTS])
        with runtime().on(self._down):
            runtime().copy(self.slot(number, chunk), chunk)
        arrived: torch.cuda.Event = self._down.record_event()
        return arrived

    def up(self, number: int, chunk: Tensor) -> None:
        """Begin to copy a chunk back."""
        with runtime().on(self._up):
            runtime().copy(chunk, self.slot(number, chunk))
        self._sent[number % SLOTS] = self._up.record_event()

    def join(self) -> None:
        """Let the current stream wait for all of it."""
        self._current.wait_event(self._up.record_event())
