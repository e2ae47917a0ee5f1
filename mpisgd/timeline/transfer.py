"""Messages between the ranks of a timeline, and the concatenation of their files on rank 0."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpisgd.core.waiting import Backoff
from mpisgd.errors import CollectiveTimeout
from mpisgd.timeline.files import closing_line

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpisgd.transport.mpi import Communicator

__all__ = ["receive", "send", "send_part", "write_whole"]

CHUNK_BYTES = 4 * 2**20
TIMEOUT_S = 600.0
TAG = 2


def send(
    communicator: "Communicator", tensor: Tensor, dst: int, tag: int, timeout_s: float = TIMEOUT_S
) -> None:
    """Send a tensor and wait for the end of the message."""
    _wait(communicator, communicator.isend(tensor, dst, tag), dst, timeout_s)


def receive(
    communicator: "Communicator", tensor: Tensor, src: int, tag: int, timeout_s: float = TIMEOUT_S
) -> None:
    """Receive a tensor."""
    _wait(communicator, communicator.irecv(tensor, src, tag), src, timeout_s)


def _wait(communicator: "Communicator", request: "MPI.Request", other: int, timeout_s: float) -> None:
    if not Backoff(timeout_s).wait_for(lambda: communicator.poll([request])):
        raise CollectiveTimeout(
            f"timeline: rank {communicator.rank} has waited {timeout_s:g} s for rank {other}"
        )


def write_whole(communicator: "Communicator", part: Path, whole: Path) -> None:
    """Write the file of all ranks out of the parts of rank 0, here, and of the others, which send them."""
    with whole.open("wb") as out:
        for chunk in _chunks_of(part):
            out.write(chunk)
        for rank in range(1, communicator.size):
            for chunk in _received(communicator, rank):
                out.write(chunk)
        out.write(closing_line().encode())


def send_part(communicator: "Communicator", part: Path) -> None:
    """Send this rank's part to rank 0, without its first and its last line."""
    begin = len("[\n")
    for chunk in itertools.chain(_chunks_of(part), [b""]):
        content, begin = bytearray(chunk[begin:]), 0
        send(communicator, torch.tensor([len(content)]), 0, TAG)
        if content:
            send(communicator, torch.frombuffer(content, dtype=torch.uint8), 0, TAG)


def _chunks_of(part: Path) -> Iterator[bytes]:
    """Return a part without its last line."""
    end = part.stat().st_size - len(closing_line())
    with part.open("rb") as file:
        while (left := end - file.tell()) > 0:
            yield file.read(min(CHUNK_BYTES, left))


def _received(communicator: "Communicator", rank: int) -> Iterator[bytes]:
    length = torch.zeros(1, dtype=torch.int64)
    while True:
        receive(communicator, length, rank, TAG)
        if not int(length):
            return
        chunk = torch.empty(int(length), dtype=torch.uint8)
        receive(communicator, chunk, rank, TAG)
        yield chunk.numpy().tobytes()
