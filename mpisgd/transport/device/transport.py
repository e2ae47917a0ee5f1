"""`DeviceTransport`: how a group's operations on device tensors go. Opened at the first, by all ranks.

A group that never sees a GPU pays nothing. The first operation on one finds out, in the queue's order, what
every rank has, and what was chosen then holds for all later ones: so ranks cannot choose differently.
"""

import socket
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from mpisgd.accelerator.runtime import Stream, runtime
from mpisgd.core.consistency import Operation
from mpisgd.errors import Unreachable
from mpisgd.transport.device.cuda_aware import is_cuda_aware
from mpisgd.transport.device.cuda_aware_mpi import CudaAwareMpi
from mpisgd.transport.device.device_collectives import DeviceCollectives
from mpisgd.transport.device.nccl import Nccl
from mpisgd.transport.device.selection import AWARE, NCCL, STAGING, DeviceFacts, Verdict, choose
from mpisgd.transport.device.stream_guard import StreamGuard
from mpisgd.transport.tcp_store.store import open_store

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["DeviceTransport", "device_transport_of"]


class DeviceTransport:
    """What one group does with device tensors.

    Attributes:
        verdict: the way that was chosen.
        direct: what takes them where they lie; None where all are staged.
    """

    def __init__(self, verdict: Verdict, direct: DeviceCollectives | None) -> None:
        self.verdict = verdict
        self.direct = direct
        self._streams: dict[torch.device, Stream] = {}

    def passage(self, device: torch.device, *, waits: bool) -> StreamGuard:
        """Return the way of one operation whose tensors go through host memory.

        The stream is the group's own: on one shared with other groups its copies could come after theirs,
        and no group waits for another.
        """
        if device not in self._streams:
            self._streams[device] = runtime().new_stream(device)
        return StreamGuard(device, self._streams[device], waits=waits)

    def close(self) -> None:
        """Give back what it holds. Collective."""
        if self.direct is not None:
            self.direct.close()


def device_transport_of(group: "Group", tensor: Tensor, operation: Operation, wanted: str) -> DeviceTransport:
    """Return the group's way for device tensors. Collective at the first time.

    Args:
        group: of the operation.
        tensor: of the operation; its device is the one this rank works on.
        operation: told when ranks disagree.
        wanted: one of `mpisgd.config.GPU_CHOICES`, the same on all ranks.

    Raises:
        InvalidArgument: NCCL was asked for and cannot be; on every rank.
        CollectiveMismatch: other ranks are not at an operation on device tensors; raised on every rank.
    """
    transport: DeviceTransport | None = group.device
    if transport is None:
        transport = group.device = _open(group, tensor, operation, wanted)
    return transport


def _open(group: "Group", tensor: Tensor, operation: Operation, wanted: str) -> DeviceTransport:
    verdict = choose(wanted, _gather_seats(group, tensor, operation), group.ranks)
    if verdict.way == AWARE:
        return DeviceTransport(verdict, CudaAwareMpi(group))
    if verdict.way == NCCL:
        opened = _open_nccl(group)
        if isinstance(opened, DeviceCollectives):
            group.queue.on_mismatch = lambda: _forget(group)
            return DeviceTransport(verdict, opened)
        if wanted == NCCL:
            raise opened
        verdict = Verdict(STAGING, str(opened))
    if verdict.reason and group.rank == 0:
        _warn(verdict.reason)
    return DeviceTransport(verdict, None)


def _gather_seats(group: "Group", tensor: Tensor, operation: Operation) -> list[DeviceFacts]:
    """Return what every rank has. Collective."""
    mine = DeviceFacts(
        hostname=socket.gethostname(),
        node=group.topology.node_rank,
        gpu=runtime().identity(tensor.device),
        nccl=runtime().has_nccl(),
        aware=is_cuda_aware(),
    )
    seats: list[DeviceFacts] = []
    first = Operation(operation.kind, extra=f"the group's first on {runtime().kind}")
    group.queue.run(first, lambda: seats.extend(group.queue.wire.all_gather_object(mine)))
    return seats


def _open_nccl(group: "Group") -> DeviceCollectives | Unreachable:
    """Return NCCL among the members, or why there is none, the same on all. Collective."""
    opened: list[DeviceCollectives | Unreachable] = []

    def action() -> None:
        try:
            store: Any = PrefixStore("nccl", open_store(group.queue.wire, group.topology, _timeout_s(group)))
        except Unreachable as exc:
            opened.append(exc)
        else:
            opened.append(Nccl(group, runtime().open_nccl(store, group.rank, group.size, _timeout_s(group))))

    group.queue.run(Operation("gpu", extra="open NCCL"), action)
    return opened[0]


def _timeout_s(group: "Group") -> float:
    return group.queue.consistency.timeout_s


def _forget(group: "Group") -> None:
    """After a disagreement some ranks may wait in NCCL for others that never come: begin anew, all of us."""
    plane, group.device = group.device, None
    if plane is not None and plane.direct is not None:
        plane.direct.abandon()


_warned = False


def _warn(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"GPU tensors go through host memory, which is slower than NCCL: {reason}. "
            "mpisgd.init(gpu='mpi') or MPISGD_GPU=mpi asks for that in silence",
            RuntimeWarning,
            stacklevel=2,
        )
