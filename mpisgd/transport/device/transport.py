"""`DeviceTransport`: what a group has for tensors on a device. Opened at the first of them, by all ranks.

A group that never sees a GPU pays nothing. The first operation on one finds out, in the queue's order, what
every rank has, and what was chosen then holds for all later ones: so ranks cannot choose differently.
"""

import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from mpisgd.accelerator.runtime import runtime
from mpisgd.core.consistency import Operation
from mpisgd.errors import MpisgdError, NcclFailed, Unreachable
from mpisgd.transport.device.backend import DeviceBackend
from mpisgd.transport.device.cuda_aware import is_cuda_aware
from mpisgd.transport.device.cuda_aware_mpi import CudaAwareMpi
from mpisgd.transport.device.cuda_aware_trial import failed_transfer
from mpisgd.transport.device.nccl import Nccl
from mpisgd.transport.device.nccl_group import can_split, connect_all, open_nccl, split_nccl
from mpisgd.transport.device.selection import (
    AWARE,
    NCCL,
    STAGING,
    DeviceFacts,
    Selection,
    choose,
    warn_of_host_memory,
)
from mpisgd.transport.tcp_store.store import open_store

if TYPE_CHECKING:
    from mpisgd.core.group import Group

__all__ = ["DeviceTransport", "can_be_split", "device_transport", "split_from"]


class DeviceTransport:
    """What one group does with device tensors.

    Attributes:
        selection: NCCL, CUDA-aware MPI or host memory, and why.
        backend: what takes them where they lie; None where all go through host memory.
        devices: that NCCL has been asked for, in order; as many on each rank.
        facts: of every rank, for one of these after the other.
    """

    def __init__(self, selection: Selection, backend: DeviceBackend | None) -> None:
        self.selection = selection
        self.backend = backend
        self.devices: list[torch.device] = []
        self.facts: list[DeviceFacts] = []

    def close(self) -> None:
        """Give back what it holds. Collective."""
        if self.backend is not None:
            self.backend.close()

    def abandon(self, error: MpisgdError) -> None:
        """End what is in flight on a device, which raises `error` from now on. From any thread."""
        if self.backend is not None:
            self.backend.abandon(error)


def device_transport(group: "Group", tensor: Tensor, operation: Operation, wanted: str) -> DeviceTransport:
    """Return the group's transport for device tensors. Collective at the first time.

    Args:
        group: of the operation.
        tensor: of the operation; its device is one that this rank works on.
        operation: told when ranks disagree.
        wanted: one of `mpisgd.config.GPU_CHOICES`, the same on all ranks.

    Raises:
        InvalidArgument: NCCL was asked for and cannot be; on every rank.
        CollectiveMismatch: other ranks are not at an operation on device tensors, or on as many GPUs; raised
            on every rank.
    """
    if group.device is None:
        facts = _gather_facts(group, tensor, operation, 1)
        group.device = _open(group, tensor.device, facts, wanted)
        group.device.devices.append(tensor.device)
        group.device.facts += facts
    transport: DeviceTransport = group.device
    if transport.selection.name == NCCL and tensor.device not in transport.devices:
        group.device = transport = _with_another_gpu(group, transport, tensor, operation, wanted)
    return transport


def _with_another_gpu(
    group: "Group", transport: DeviceTransport, tensor: Tensor, operation: Operation, wanted: str
) -> DeviceTransport:
    """Return a transport for a further GPU of each rank, too: NCCL has a communicator for each.

    All ranks come to their next one by the same operation, and none shares any with another rank.

    Raises:
        NcclFailed: a rank cannot be connected; on every rank. The group begins anew.
    """
    facts = _gather_facts(group, tensor, operation, len(transport.devices) + 1)
    together = [*transport.facts, *facts]
    selection = choose(wanted, together, [*group.ranks] * (len(together) // group.size))
    if selection.name != NCCL:
        transport.close()
        group.queue.on_mismatch = lambda: None
        if group.rank == 0:
            warn_of_host_memory(selection.reason)
        return DeviceTransport(selection, None)
    assert isinstance(transport.backend, Nccl)
    inner = transport.backend.inner
    failed: list[NcclFailed | None] = []

    def action() -> None:
        failed.append(connect_all(group, lambda: inner.eager_connect_single_device(tensor.device)))

    group.queue.run(Operation("gpu", extra="connect a further one"), action)
    if failed[0] is not None:
        _forget(group)
        raise failed[0]
    transport.devices.append(tensor.device)
    transport.facts = together
    return transport


def _open(group: "Group", device: torch.device, facts: Sequence[DeviceFacts], wanted: str) -> DeviceTransport:
    selection = choose(wanted, facts, group.ranks)
    if selection.name == AWARE:
        failed = failed_transfer(group, device)
        if not failed:
            return DeviceTransport(selection, CudaAwareMpi(group))
        reason = f"MPI says that it takes addresses on a GPU, and it does not: {failed}"
        selection = Selection(STAGING, reason)
    if selection.name == NCCL:
        opened = _open_nccl(group, device)
        if isinstance(opened, DeviceTransport):
            return opened
        if wanted == NCCL or not isinstance(opened, Unreachable):
            raise opened
        selection = Selection(STAGING, str(opened))
    if selection.reason and group.rank == 0:
        warn_of_host_memory(selection.reason)
    return DeviceTransport(selection, None)


def _gather_facts(group: "Group", tensor: Tensor, operation: Operation, number: int) -> list[DeviceFacts]:
    """Gather the facts of all ranks: this is the group's first operation on so many GPUs. Collective."""
    mine = DeviceFacts(
        hostname=socket.gethostname(),
        node=group.topology.node_rank,
        gpu=runtime().identity(tensor.device),
        nccl=runtime().has_nccl(),
        aware=is_cuda_aware(),
    )
    facts: list[DeviceFacts] = []
    place = f"its GPU number {number}" if number > 1 else runtime().kind
    first = Operation(operation.kind, extra=f"the group's first on {place}")
    group.queue.run(first, lambda: facts.extend(group.queue.communicator.all_gather_object(mine)))
    return facts


def _open_nccl(group: "Group", device: torch.device) -> DeviceTransport | MpisgdError:
    """Return NCCL among the members, or why there is none, the same on all. Collective."""
    opened: list[Nccl | MpisgdError] = []

    def action() -> None:
        try:
            queue = group.queue
            store = open_store(queue.communicator, group.topology, queue.consistency.timeout_s)
        except Unreachable as exc:
            opened.append(exc)
        else:
            opened.append(open_nccl(group, PrefixStore("nccl", store), device))

    group.queue.run(Operation("gpu", extra="open NCCL"), action)
    return _transport_by(group, opened[0]) if isinstance(opened[0], Nccl) else opened[0]


def _transport_by(group: "Group", opened: Nccl) -> DeviceTransport:
    """Return the transport of a group that has NCCL."""
    opened.watch()
    group.queue.on_mismatch = lambda: _forget(group)
    return DeviceTransport(Selection(NCCL), opened)


def can_be_split(world: "Group") -> bool:
    """Return whether a group can have a communicator of NCCL that is split from the world's."""
    return world.job.gpu != "mpi" and world.device is not None and can_split(world.device.backend)


def split_from(world: "Group", group: "Group") -> None:
    """Give a new group its own communicator of NCCL, split from the world's. Collective over the world.

    All ranks have told that theirs `can_be_split`.

    Raises:
        NcclFailed: a rank cannot be connected, or its GPU is busy for too long; on every rank of the world.
    """
    parent: Nccl = world.device.backend
    opened: list[Nccl | NcclFailed | None] = []

    def action() -> None:
        opened.append(split_nccl(world, group, parent, lambda: _forget(world)))

    world.queue.run(Operation("new_group", extra="split NCCL"), action)
    if isinstance(opened[0], NcclFailed):
        raise opened[0]
    if opened[0] is not None:
        group.device = _transport_by(group, opened[0])


def _forget(group: "Group") -> None:
    """After a disagreement some ranks may wait in NCCL for others that never come: begin anew, all of us."""
    device, group.device = group.device, None
    if device is not None:
        device.abandon(
            NcclFailed(f"group '{group.name}': NCCL was ended, since the ranks did not do the same by it")
        )
