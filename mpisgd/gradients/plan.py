"""Which gradients travel together, and in what memory: agreed on by all ranks, followed every step."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.accelerator.runtime import on_device
from mpisgd.compress.compressor import BucketReducer, Compressor
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import dtype_name
from mpisgd.gradients.bucketing import ALIGN_BYTES, Bucket, Item, launch_order, plan_buckets, plan_hash
from mpisgd.gradients.fusion_buffer import FusionBuffer
from mpisgd.gradients.layout import layout_of
from mpisgd.gradients.sum_reducer import SumReducer
from mpisgd.gradients.unbucketed import UnbucketedGradient
from mpisgd.transport.ipc.segment import Segment
from mpisgd.transport.shm.region import Region
from mpisgd.transport.shm.transport import ShmTransport

__all__ = ["BucketSlot", "Plan", "agree_on_plan", "describe"]


class BucketSlot(NamedTuple):
    """One bucket of a plan: where its gradients lie while they travel, and what reduces them.

    Attributes:
        storage: the memory of the gradients.
        reducer: combines them over the ranks.
        owner: the rank of the one host that wants the result; None: all do.
    """

    storage: FusionBuffer | UnbucketedGradient
    reducer: BucketReducer
    owner: int | None = None

    @property
    def bucket(self) -> Bucket:
        """Which gradients these are."""
        return self.storage.bucket

    @property
    def region(self) -> Region | None:
        """The shared memory in which the gradients lie; None where they lie elsewhere."""
        return self.reducer.region if isinstance(self.reducer, SumReducer) else None

    @property
    def in_shared_memory(self) -> bool:
        """Whether the bucket is reduced in the shared memory of hosts; the same on all ranks."""
        return isinstance(self.reducer, SumReducer) and self.reducer.in_shared_memory


class Plan(NamedTuple):
    """What every rank of a group does with the gradients of its parameters.

    Attributes:
        covered: indices of the parameters that take part.
        slots: the buckets, in the order in which they are launched.
        sparse: indices of those whose gradients are sparse, which travel apart.
        name: differs between plans that differ.
    """

    covered: tuple[int, ...]
    slots: tuple[BucketSlot, ...]
    sparse: frozenset[int]
    name: str

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Return whether the parameters still have the dtypes and shapes that the plan was made for."""
        return all(slot.storage.fits([params[i] for i in slot.bucket.indices]) for slot in self.slots)


def agree_on_plan(
    params: Sequence[Tensor],
    covered: tuple[int, ...],
    known_sparse: frozenset[int],
    observed: Sequence[int],
    *,
    group: Group,
    compression: Compressor,
    cap_bytes: int,
    when: str,
    owners: Sequence[int] | None = None,
) -> Plan:
    """Make the same plan on every rank: rank 0's order, and apart what is sparse on any rank. Collective.

    Args:
        params: all of the optimizer's.
        covered: indices of those that take part.
        known_sparse: indices of those whose gradients were sparse once.
        observed: the order in which gradients became ready.
        group: the ranks.
        compression: what travels.
        cap_bytes: most bytes of a bucket.
        when: which reduction of the program this is.
        owners: the rank of the one host that wants the gradient of each parameter; None: all do.
    """
    mine = [i for i in covered if (grad := params[i].grad) is not None and grad.is_sparse]
    everyone: list[tuple[Sequence[int], list[int]]] = []
    group.queue.run(
        Operation("gradients", extra=f"new plan for {describe(covered, len(params))}, {when}"),
        lambda: everyone.extend(group.queue.communicator.all_gather_object((observed, mine))),
    )
    sparse = known_sparse.union(*(indices for _, indices in everyone)).intersection(covered)
    dense = set(covered) - sparse
    devices = name_devices([param.device for param in params])
    buckets = plan_buckets(
        [_item(i, params[i], devices, "" if owners is None else f":{owners[i]}") for i in sorted(dense)],
        cap_bytes=cap_bytes,
        order=[i for i in launch_order(len(params), everyone[0][0]) if i in dense],
        align_bytes=_alignment([params[i].dtype for i in dense], compression),
        alone_bytes=ALONE_BYTES,
    )
    slots = [_slot(b, [params[i] for i in b.indices], group, compression) for b in buckets]
    if owners is not None:
        slots = [slot._replace(owner=owners[slot.bucket.indices[0]]) for slot in slots]
    name = f"{plan_hash(buckets):016x}-{_layout_hash(params, covered)}"
    return Plan(covered, tuple(slots), sparse, name)


def _alignment(dtypes: Sequence[torch.dtype], compression: Compressor) -> int:
    """Return where gradients begin in a bucket; a compressor that looks at it as a whole finds no padding."""
    return 1 if any(compression.wire_dtype(dtype) is None for dtype in dtypes) else ALIGN_BYTES


def _layout_hash(params: Sequence[Tensor], covered: Sequence[int]) -> str:
    """Return a name for the order in which elements travel; `model.to(memory_format=...)` changes it."""
    strides = [layout_of(params[index]).stride for index in covered]
    return hashlib.blake2b(repr(strides).encode(), digest_size=4).hexdigest()


def describe(covered: tuple[int, ...], total: int) -> str:
    """Say which of the parameters take part, shortly."""
    missing = sorted(set(range(total)) - set(covered))
    if not missing:
        return f"all {total} parameters"
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"{len(covered)} of {total} parameters (frozen: {listed})"


def name_devices(devices: Sequence[torch.device]) -> dict[torch.device, str]:
    """Return what to call devices, alike on all ranks: what is cuda:0 here may be cuda:1 elsewhere."""
    names: dict[torch.device, str] = {}
    for device in devices:
        alike = sum(other.type == device.type for other in names)
        names.setdefault(device, f"{device.type}#{alike}" if alike else device.type)
    return names


def _item(index: int, param: Tensor, devices: Mapping[torch.device, str], owner: str) -> Item:
    key = f"{dtype_name(param.dtype)}:{devices[param.device]}{owner}"
    return Item(index, param.numel(), param.element_size(), key)


def _slot(bucket: Bucket, params: Sequence[Tensor], group: Group, compression: Compressor) -> BucketSlot:
    """Return the memory for a bucket: its gradient's own, or, where the ranks share memory, there.

    What is on a device stays there.
    """
    dtype = params[0].dtype
    nbytes, compressed = bucket.numel * dtype.itemsize, compression.changes(dtype)
    reducer = compression.reducer(bucket.numel, dtype) if compressed else SumReducer(nbytes)
    if nbytes >= ALONE_BYTES and len(params) == 1:
        return BucketSlot(UnbucketedGradient(bucket, params[0]), reducer)
    shares = group.shm is not None or group.internode is not None
    if on_device(params[0]) or compressed or not bucket.numel or not shares:
        flat = torch.empty(bucket.numel, dtype=dtype, device=params[0].device)
        return BucketSlot(FusionBuffer(bucket, params, flat), reducer)
    region = _shared(bucket.numel, dtype, group)
    flat = torch.empty(bucket.numel, dtype=dtype) if region is None else region.mine
    reducer = SumReducer(nbytes, in_shared_memory=True, region=region)
    return BucketSlot(FusionBuffer(bucket, params, flat), reducer)


def _shared(numel: int, dtype: torch.dtype, group: Group) -> Region | None:
    """Return shared memory for this host's ranks. Collective, also over hosts where a rank is alone."""
    memory: ShmTransport | None = group.transports.memory
    made: list[Segment | None] = []
    group.queue.run(
        Operation("gradients", dtype=dtype_name(dtype), shape=(numel,), extra="allocation"),
        lambda: made.append(None if memory is None else memory.open_segment(numel * dtype.itemsize)),
    )
    if memory is None or made[0] is None:
        return None
    return memory.region(made[0], numel, dtype)
