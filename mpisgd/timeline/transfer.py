"""Messages between the ranks of a timeline, and the concatenation of their files on rank 0."""

from pathlib import Path

import torch
from torch import Tensor

from mpisgd.errors import CollectiveTimeout
from mpisgd.interfaces.communicator import GroupCommunicator, Request
from mpisgd.threads.waiting import Backoff
from mpisgd.timeline.files import CLOSING, OPENING

__all__ = ["receive", "send", "send_part", "write_whole"]

CHUNK_BYTES = 4 * 2**20
TIMEOUT_S = 600.0
TAG = 2


def send(
    communicator: GroupCommunicator, tensor: Tensor, dst: int, tag: int, timeout_s: float = TIMEOUT_S
) -> None:
    """Send a tensor and wait for the end of the message."""
    _wait(communicator, communicator.isend(tensor, dst, tag), dst, timeout_s)


def receive(
    communicator: GroupCommunicator, tensor: Tensor, src: int, tag: int, timeout_s: float = TIMEOUT_S
) -> None:
    """Receive a tensor."""
    _wait(communicator, communicator.irecv(tensor, src, tag), src, timeout_s)


def _wait(communicator: GroupCommunicator, request: Request, other: int, timeout_s: float) -> None:
    if not Backoff(timeout_s).wait_for(lambda: communicator.poll([request])):
        raise CollectiveTimeout(
            f"timeline: rank {communicator.rank} has waited {timeout_s:g} s for rank {other}"
        )


def write_whole(communicator: GroupCommunicator, part: Path, whole: Path) -> None:
    """Write the file of all ranks out of the parts of rank 0, here, and of the others, which send them."""
    size = torch.zeros(1, dtype=torch.int64)
    with whole.open("wb") as out:
        out.write(OPENING.encode())
        out.write(_events_of(part).numpy().data)
        for rank in range(1, communicator.size):
            receive(communicator, size, rank, TAG)
            for begin in range(0, int(size), CHUNK_BYTES):
                chunk = torch.empty(min(CHUNK_BYTES, int(size) - begin), dtype=torch.uint8)
                receive(communicator, chunk, rank, TAG)
                out.write(chunk.numpy().data)
        out.write(CLOSING.encode())


def send_part(communicator: GroupCommunicator, part: Path) -> None:
    """Send the events of this rank's part to rank 0: their size, then chunks of them."""
    events = _events_of(part)
    send(communicator, torch.tensor([len(events)]), 0, TAG)
    for begin in range(0, len(events), CHUNK_BYTES):
        send(communicator, events[begin : begin + CHUNK_BYTES], 0, TAG)


def _events_of(part: Path) -> Tensor:
    """Return the bytes of a part without its first and its last line; mapped, not read."""
    content = torch.from_file(str(part), size=part.stat().st_size, dtype=torch.uint8)
    return content[len(OPENING) : -len(CLOSING)]
