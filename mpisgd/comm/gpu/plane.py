"""`DevicePlane`: how a group's operations on device tensors go. Opened at the first of them, by all ranks.

A group that never sees a GPU pays nothing. The first operation on one finds out, in the lane's order, what
every rank has, and what was chosen then holds for all later ones: so ranks cannot choose differently.
"""

import socket
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from mpisgd.comm.gpu.aware import is_cuda_aware
from mpisgd.comm.gpu.choice import AWARE, NCCL, STAGING, Seat, Verdict, choose
from mpisgd.comm.gpu.direct import Direct
from mpisgd.comm.gpu.messages import CudaAwareMpi
from mpisgd.comm.gpu.nccl import Nccl
from mpisgd.comm.gpu.passage import Passage
from mpisgd.comm.gpu.runtime import Stream, runtime
from mpisgd.comm.handshake import Operation
from mpisgd.comm.store import open_store
from mpisgd.errors import Unreachable

if TYPE_CHECKING:
    from mpisgd.comm.group import Group

__all__ = ["DevicePlane", "plane_of"]


class DevicePlane:
    """What one group does with device tensors.

    Attributes:
        verdict: the way that was chosen.
        direct: what takes them where they lie; None where all are staged.
    """

    def __init__(self, verdict: Verdict, direct: Direct | None) -> None:
        self.verdict = verdict
        self.direct = direct
        self._streams: dict[torch.device, Stream] = {}

    def passage(self, device: torch.device, *, waits: bool) -> Passage:
        """Return the way of one operation whose tensors go through host memory.

        The stream is the group's own: on one shared with other groups its copies could come after theirs,
        and no group waits for another.
        """
        if device not in self._streams:
            self._streams[device] = runtime().new_stream(device)
        return Passage(device, self._streams[device], waits=waits)

    def close(self) -> None:
        """Give back what it holds. Collective."""
        if self.direct is not None:
            self.direct.close()


def plane_of(group: "Group", tensor: Tensor, operation: Operation, wanted: str) -> DevicePlane:
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
    if group.device is None:
        group.device = _open(group, tensor, operation, wanted)
    return group.device


def _open(group: "Group", tensor: Tensor, operation: Operation, wanted: str) -> DevicePlane:
    verdict = choose(wanted, _gather_seats(group, tensor, operation), group.ranks)
    if verdict.way == AWARE:
        return DevicePlane(verdict, CudaAwareMpi(group))
    if verdict.way == NCCL:
        opened = _open_nccl(group)
        if isinstance(opened, Direct):
            group.lane.after_mismatch = lambda: _forget(group)
            return DevicePlane(verdict, opened)
        if wanted == NCCL:
            raise opened
        verdict = Verdict(STAGING, str(opened))
    if verdict.reason and group.rank == 0:
        _warn(verdict.reason)
    return DevicePlane(verdict, None)


def _gather_seats(group: "Group", tensor: Tensor, operation: Operation) -> list[Seat]:
    """Return what every rank has. Collective."""
    mine = Seat(
        hostname=socket.gethostname(),
        node=group.topology.node_rank,
        gpu=runtime().identity(tensor.device),
        nccl=runtime().has_nccl(),
        aware=is_cuda_aware(),
    )
    seats: list[Seat] = []
    first = Operation(operation.kind, extra=f"the group's first on {runtime().kind}")
    group.lane.run(first, lambda: seats.extend(group.lane.wire.all_gather_object(mine)))
    return seats


def _open_nccl(group: "Group") -> Direct | Unreachable:
    """Return NCCL among the members, or why there is none, the same on all. Collective."""
    opened: list[Direct | Unreachable] = []

    def action() -> None:
        try:
            store: Any = PrefixStore("nccl", open_store(group.lane.wire, group.topology, _timeout_s(group)))
        except Unreachable as exc:
            opened.append(exc)
        else:
            opened.append(Nccl(group, runtime().open_nccl(store, group.rank, group.size, _timeout_s(group))))

    group.lane.run(Operation("gpu", extra="open NCCL"), action)
    return opened[0]


def _timeout_s(group: "Group") -> float:
    return group.lane.handshake.timeout_s


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
