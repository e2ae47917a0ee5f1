"""A trial of what an MPI says of itself: does it move and add what lies on the GPUs of these ranks?

The library may have been compiled for GPUs, and the transport below it, or this start of it, not. Then some
read host memory at the same address, some copy nothing, some return an error: that is found here. One that
ends the process with a signal cannot be caught.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mpisgd.accelerator.runtime import runtime
from mpisgd.core.consistency import Operation
from mpisgd.errors import MpisgdError
from mpisgd.interfaces.communicator import GroupCommunicator
from mpisgd.transport.messages.link import Link

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["failed_transfer"]

NUMELS = (4, 2**18)  # of float32: what MPI sends at once, and what it announces first


def failed_transfer(group: "Group", device: torch.device) -> str:
    """Return which transfer does not arrive as it should, on any rank; "" where all do. Collective.

    Args:
        group: whose ranks try.
        device: of this rank.
    """
    told: list[str] = []

    def action() -> None:
        communicator = group.queue.communicator.duplicate()  # of its own: an error may leave it unusable
        try:
            mine = _first_failure(communicator, device, group.queue.consistency.timeout_s)
        finally:
            communicator.free()
        told.extend(group.queue.communicator.all_gather_object(mine))

    group.queue.run(Operation("gpu", extra="does MPI take addresses on it?"), action)
    failed = [f"rank {rank}: {text}" for rank, text in zip(group.ranks, told, strict=True) if text]
    return failed[0] if failed else ""


def _first_failure(communicator: GroupCommunicator, device: torch.device, timeout_s: float) -> str:
    failures = []
    for numel in NUMELS:
        for name, call, tensor, wanted in _transfers(communicator, device, numel, timeout_s):
            runtime().current_stream(device).record_event().synchronize()
            try:
                call()
            except MpisgdError as exc:
                failures.append(f"{name} of {4 * numel} bytes: {exc}")
            else:
                if not torch.equal(tensor.cpu(), wanted):
                    failures.append(f"{name} of {4 * numel} bytes gave other values")
    return failures[0] if failures else ""


Transfer = tuple[str, Callable[[], object], Tensor, Tensor]


def _transfers(
    communicator: GroupCommunicator, device: torch.device, numel: int, timeout_s: float
) -> Iterator[Transfer]:
    """Yield name, call, where its result arrives, and what that must be."""
    rank, size = communicator.rank, communicator.size

    def of(number: int) -> Tensor:
        return torch.arange(numel, dtype=torch.float32) % 7 + number

    mine = of(rank).to(device)
    yield "broadcast", lambda: communicator.broadcast(mine, size - 1), mine, of(size - 1)
    added = of(rank).to(device)
    total = torch.stack([of(other) for other in range(size)]).sum(0)
    yield "all_reduce", lambda: communicator.all_reduce(added, "SUM"), added, total
    own, every = of(rank).to(device), torch.zeros(size * numel, device=device)
    joined = torch.cat([of(other) for other in range(size)])
    yield "all_gather", lambda: communicator.all_gather(every, own), every, joined
    sent, got = of(rank).to(device), torch.zeros(numel, device=device)
    link = Link(communicator, "trial of GPU addresses", timeout_s)
    yield (
        "message",
        lambda: link.transfer(sends=[((rank + 1) % size, sent)], receives=[((rank - 1) % size, got)]),
        got,
        of((rank - 1) % size),
    )
