"""Long device tensors to ordinary host memory and back, through a few pieces of pinned memory.

Pinned memory of a tensor's size would be a large part of what a machine has of it: torch rounds it up to a
power of two, and keeps it until the process ends. So only pieces are pinned, and used in turn:

    device   copy 0 | copy 1 | copy 2 | ...
    host            | move 0 | move 1 | ...
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import runtime

__all__ = ["CHUNK_BYTES", "fetch", "goes_by_pieces", "put"]

# Long against what it takes to start a copy (tens of microseconds, where the bus moves this in a few
# hundred), short against a tensor that is worth it: the first copy down and the last one up overlap nothing.
# Reasoned, not measured.
CHUNK_BYTES = 4 * 2**20
SLOTS = 2


def goes_by_pieces(numel: int, dtype: torch.dtype) -> bool:
    """Return whether a tensor is so long that it is not pinned as a whole."""
    return numel * dtype.itemsize >= 2 * CHUNK_BYTES


def fetch(source: Tensor, there: Tensor) -> None:
    """Copy contiguous [n] of a device to [n] of the host; the copy is complete."""
    arriving = None
    for piece, slot, out in _pieces(source, there):
        runtime().copy(slot, piece)
        event = runtime().current_stream(source.device).record_event()
        if arriving is not None:
            _move(*arriving)
        arriving = event, slot, out
    if arriving is not None:
        _move(*arriving)


def _move(event: torch.cuda.Event, slot: Tensor, out: Tensor) -> None:
    event.synchronize()
    out.copy_(slot)


def put(flat: Tensor, out: Tensor) -> None:
    """Begin to copy [n] of the host to contiguous [n] of a device; `flat` may change when this returns."""
    events: list[torch.cuda.Event] = []
    for piece, slot, source in _pieces(out, flat):
        if len(events) >= SLOTS:
            events[-SLOTS].synchronize()
        slot.copy_(source)
        runtime().copy(piece, slot)
        events.append(runtime().current_stream(out.device).record_event())


def _pieces(device: Tensor, host: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield pieces on the device, the pinned memory that each goes through, and pieces on the host."""
    numel = CHUNK_BYTES // device.element_size()
    slots = [runtime().pinned(numel, device.dtype) for _ in range(SLOTS)]
    pairs = zip(torch.split(device, numel), torch.split(host, numel), strict=True)
    for number, (piece, other) in enumerate(pairs):
        yield piece, slots[number % SLOTS][: piece.numel()], other
