"""`GradientPlan`: which gradients of an exchange travel together, and in which memory."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.dtypes import dtype_name
from mpisgd.gradients.bucketing import Bucket, Item, plan_buckets
from mpisgd.gradients.fusion_buffer import FusionBuffer
from mpisgd.gradients.unbucketed import UnbucketedGradient

__all__ = ["GradientPlan", "make_plan"]

BUCKET_BYTES = 25 * 2**20


class GradientPlan(NamedTuple):
    """The same on all ranks as long as their parameters are.

    Attributes:
        loads: the buckets of dense gradients.
        place_of: the bucket of each parameter that is in one.
        sparse_dims: of the parameters whose gradients are sparse, which travel by themselves.
        about: a line for each parameter, by which ranks compare their plans.
    """

    loads: Sequence[FusionBuffer | UnbucketedGradient]
    place_of: Mapping[int, int]
    sparse_dims: Mapping[int, int]
    about: str


def make_plan(
    params: Sequence[Tensor],
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    sparse_dims: Mapping[int, int],
) -> GradientPlan:
    """Plan for some parameters.

    Args:
        params: all of them.
        names: theirs.
        groups: lists of indices that travel together; what is in none is packed by size.
        sparse_dims: of those whose gradients are known to be sparse, by index.
    """
    loads = [_load(bucket, params) for bucket in _cut(params, groups, sparse_dims)]
    place_of = {index: place for place, load in enumerate(loads) for index in load.bucket.indices}
    about = "\n".join(
        f"{name} {dtype_name(param.dtype)}{list(param.shape)}" + " sparse" * (index in sparse_dims)
        for index, (name, param) in enumerate(zip(names, params, strict=True))
    )
    return GradientPlan(loads, place_of, sparse_dims, about)


def _cut(
    params: Sequence[Tensor], groups: Sequence[Sequence[int]], without: Mapping[int, int]
) -> list[Bucket]:
    """Pack parameters into buckets: each group by itself, the others by size."""
    grouped = {index for group in groups for index in group}
    items = [_item(index, param) for index, param in enumerate(params)]
    dense = [item for item in items if item.index not in without]
    buckets = [
        bucket
        for group in groups
        for bucket in plan_buckets([items[i] for i in group if i not in without], cap_bytes=2**62)
    ]
    rest = [item for item in dense if item.index not in grouped]
    return [*buckets, *plan_buckets(rest, cap_bytes=BUCKET_BYTES, alone_bytes=ALONE_BYTES)]


def _item(index: int, param: Tensor) -> Item:
    return Item(index, param.numel(), param.element_size(), f"{dtype_name(param.dtype)}:{param.device.type}")


def _load(bucket: Bucket, params: Sequence[Tensor]) -> FusionBuffer | UnbucketedGradient:
    inside = [params[index] for index in bucket.indices]
    if len(inside) == 1 and bucket.numel * inside[0].element_size() >= ALONE_BYTES:
        return UnbucketedGradient(bucket, inside[0])
    flat = torch.empty(bucket.numel, dtype=inside[0].dtype, device=inside[0].device)
    return FusionBuffer(bucket, inside, flat)
