"""Which gradients travel together, and in what memory: agreed on by all ranks, followed every step."""

import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.accelerator.runtime import on_device
from mpisgd.compress.compressor import BucketLayout, BucketReducer, Compressor, wire_dtype_of
from mpisgd.compress.sum_reducer import SumReducer
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.dtypes import dtype_name
from mpisgd.gradients.bucketing import ALIGN_BYTES, Bucket, Item, launch_order, plan_buckets, plan_hash
from mpisgd.gradients.fusion_buffer import FusionBuffer, StridedLayout, layout_of, shape_in_memory
from mpisgd.gradients.in_place_gradient import InPlaceGradient
from mpisgd.gradients.options import ReductionOptions
from mpisgd.interfaces.host_transport import Region

__all__ = [
    "BucketPlan",
    "BucketSlot",
    "agree_on_plan",
    "describe_covered",
    "is_alone",
    "item_of",
    "make_slot",
    "plain_slot",
]


class BucketSlot(NamedTuple):
    """One bucket of a plan: where its gradients lie while they travel, and what reduces them.

    Attributes:
        storage: the memory of the gradients.
        reducer: combines them over the ranks.
        in_shared_memory: whether it does so in the shared memory of hosts; the same on all ranks.
        region: that memory; None where the gradients lie elsewhere.
    """

    storage: FusionBuffer | InPlaceGradient
    reducer: BucketReducer
    in_shared_memory: bool = False
    region: Region | None = None

    @property
    def bucket(self) -> Bucket:
        """Which gradients these are."""
        return self.storage.bucket

    @property
    def layouts(self) -> Sequence[StridedLayout]:
        """How each of them lies there."""
        return self.storage.layouts

    def in_place(self, params: Sequence[Tensor]) -> list[int]:
        """Return the parameters whose gradients lie where they travel; none where owners have them."""
        grads = {i: params[i].grad for i in self.bucket.indices}
        dense = {i: grad for i, grad in grads.items() if grad is not None and not grad.is_sparse}
        if not dense:  # they may be at their owners, and what has travelled is freed then
            return []
        first = self.storage.flat.data_ptr()
        last = first + self.storage.flat.nbytes
        return [i for i, grad in dense.items() if first <= grad.data_ptr() < last]


class BucketPlan(NamedTuple):
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

    @property
    def order(self) -> tuple[int, ...]:
        """The parameters that take part, in the order of packing: observed so, they are packed as here."""
        return (*(index for slot in self.slots for index in slot.bucket.indices), *sorted(self.sparse))

    def fits(self, params: Sequence[Tensor]) -> bool:
        """Return whether the parameters still have the dtypes and layouts that the plan was made for."""
        return all(slot.storage.fits([params[i] for i in slot.bucket.indices]) for slot in self.slots)


def agree_on_plan(
    params: Sequence[Tensor],
    covered: tuple[int, ...],
    known_sparse: frozenset[int],
    observed: Sequence[int],
    *,
    is_known: bool,
    group: Group,
    options: ReductionOptions,
    when: str,
    make_slots: Callable[[Sequence[Bucket]], Sequence[BucketSlot]],
    order: Sequence[int] | None = None,
    storage_order: Sequence[int] | None = None,
) -> BucketPlan:
    """Make the same plan on every rank, apart what is sparse on any rank. Collective.

    Args:
        params: all of the optimizer's.
        covered: indices of those that take part.
        known_sparse: indices of those whose gradients were sparse once.
        observed: the order in which gradients became ready, or that of a plan before.
        is_known: whether it is that of a plan of the same parameters, which is made again: what is sparse now
            for the first time comes late then, as it would have with that plan.
        group: the ranks.
        options: what travels, and most bytes of a bucket.
        when: which reduction of the program this is.
        make_slots: returns where buckets travel from, and what reduces them; collective.
        order: in which gradients are packed, the same on all ranks; None: as rank 0 has observed them.
        storage_order: in which those of a bucket lie there, the same on all ranks; None: as they are packed.
    """
    now = () if is_known else covered
    mine = [i for i in now if (grad := params[i].grad) is not None and grad.is_sparse]
    everyone: list[tuple[Sequence[int], list[int]]] = []
    group.queue.run(
        Operation("gradients", extra=f"new plan for {describe_covered(covered, len(params))}, {when}"),
        lambda: everyone.extend(group.queue.communicator.all_gather_object((observed, mine))),
    )
    sparse = known_sparse.union(*(indices for _, indices in everyone)).intersection(covered)
    dense = set(covered) - sparse
    devices = name_devices([param.device for param in params])
    # A compressor that looks at a bucket as a whole finds no padding in it.
    padded = all(wire_dtype_of(options.compression, params[i].dtype) is not None for i in dense)
    taken = launch_order(len(params), everyone[0][0]) if order is None else order
    buckets = plan_buckets(
        [item_of(i, params[i], devices[params[i].device]) for i in sorted(dense)],
        cap_bytes=options.bucket_cap_bytes,
        order=[i for i in taken if i in dense],
        align_bytes=ALIGN_BYTES if padded else 1,
        alone_bytes=ALONE_BYTES,
        storage_order=storage_order,
    )
    slots = make_slots(buckets)
    # The order in which elements travel is a part of the plan; `model.to(memory_format=...)` changes it.
    strides = repr([layout_of(params[index]).stride for index in covered])
    layout_hash = hashlib.blake2b(strides.encode(), digest_size=4).hexdigest()
    return BucketPlan(covered, tuple(slots), sparse, f"{plan_hash(buckets):016x}-{layout_hash}")


def describe_covered(covered: tuple[int, ...], total: int) -> str:
    """Say which of the parameters take part, shortly."""
    missing = sorted(set(range(total)) - set(covered))
    if not missing:
        return f"all {total} parameters"
    listed = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
    return f"{len(covered)} of {total} parameters (frozen: {listed})"


def name_devices(devices: Sequence[torch.device]) -> dict[torch.device, str]:
    """Return names of devices that are alike on all ranks: what is cuda:0 here may be cuda:1 elsewhere."""
    names: dict[torch.device, str] = {}
    for device in devices:
        alike = sum(other.type == device.type for other in names)
        names.setdefault(device, f"{device.type}#{alike}" if alike else device.type)
    return names


def item_of(index: int, param: Tensor, device: str) -> Item:
    """Return the facts of a parameter that the packing of buckets depends on."""
    return Item(index, param.numel(), param.element_size(), f"{dtype_name(param.dtype)}:{device}")


def plain_slot(bucket: Bucket, params: Sequence[Tensor], flat: Tensor | None = None) -> BucketSlot:
    """Return a bucket that is summed where it travels from: a large gradient's own memory, or `flat`.

    Args:
        bucket: what travels.
        params: those of `bucket.indices`.
        flat: [bucket.numel]; None: new memory.
    """
    nbytes = bucket.numel * params[0].element_size()
    if is_alone(bucket, params):
        return BucketSlot(InPlaceGradient(bucket, params[0]), SumReducer(nbytes))
    return BucketSlot(FusionBuffer(bucket, params, flat), SumReducer(nbytes))


def is_alone(bucket: Bucket, params: Sequence[Tensor]) -> bool:
    """Return whether a bucket has one gradient, which travels from where it lies."""
    return len(params) == 1 and bucket.numel * params[0].element_size() >= ALONE_BYTES


def make_slot(bucket: Bucket, params: Sequence[Tensor], group: Group, compression: Compressor) -> BucketSlot:
    """Return the memory for a bucket, shared by the ranks where they can, and what reduces it there.

    What is on a device stays there. Collective.
    """
    dtype = params[0].dtype
    if compression.changes(dtype):
        layout = BucketLayout(tuple(map(shape_in_memory, params)), dtype, params[0].device)
        return plain_slot(bucket, params)._replace(reducer=compression.reducer(layout))
    if is_alone(bucket, params) or on_device(params[0]) or not bucket.numel or not group.shares_memory:
        return plain_slot(bucket, params)
    region = _shared(bucket.numel, dtype, group)
    storage = FusionBuffer(bucket, params, None if region is None else region.mine)
    nbytes = bucket.numel * dtype.itemsize
    reducer = SumReducer(nbytes, in_shared_memory=True, region=region)
    return BucketSlot(storage, reducer, in_shared_memory=True, region=region)


def _shared(numel: int, dtype: torch.dtype, group: Group) -> Region | None:
    """Return shared memory for this host's ranks. Collective, also over hosts where a rank is alone."""
    memory = group.host_memory
    made: list[Region | None] = []
    group.queue.run(
        Operation("gradients", dtype=dtype_name(dtype), shape=(numel,), extra="allocation"),
        lambda: made.append(None if memory is None else memory.open_region(numel, dtype)),
    )
    return made[0]
