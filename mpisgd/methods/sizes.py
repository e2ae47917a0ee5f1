"""`sizes_of`: a model for costs, in the buckets that `DistributedOptimizer` makes of it."""

import math
from collections.abc import Sequence
from typing import Any

from mpisgd.accelerator.buffers import ALONE_BYTES
from mpisgd.gradients.bucketing import ALIGN_BYTES, Item, plan_buckets
from mpisgd.methods.cost_kit import Bucket, Parameter, Sizes

__all__ = ["parameter", "sizes_of"]


def parameter(
    place: int, shape: Sequence[int], itemsize: int, state_bytes: int, work: float | None = None
) -> Parameter:
    """Return a parameter, which travels from where it lies if it is large."""
    found = Parameter(place, tuple(shape), itemsize, state_bytes, work=work)
    return found._replace(alone=found.nbytes >= ALONE_BYTES)


def sizes_of(parameters: Sequence[Parameter], cap_bytes: int, *, padded: bool = True, **others: Any) -> Sizes:
    """Return the sizes of a model.

    Args:
        parameters: in the order in which their gradients become complete.
        cap_bytes: of a bucket, at the most.
        padded: whether parameters begin at cache lines there, as where nothing is compressed but by casts.
        others: see `Sizes`.
    """
    return Sizes(
        tuple(parameters),
        _buckets(parameters, cap_bytes, ALIGN_BYTES if padded else 1, ALONE_BYTES),
        _buckets(parameters, cap_bytes, 1, math.inf),
        cap_bytes,
        **others,
    )


def _buckets(
    parameters: Sequence[Parameter], cap_bytes: int, align_bytes: int, alone_bytes: float
) -> tuple[Bucket, ...]:
    planned = plan_buckets(
        [Item(each.place, each.numel, each.itemsize, str(each.itemsize)) for each in parameters],
        cap_bytes=cap_bytes,
        order=[each.place for each in parameters],
        align_bytes=align_bytes,
        alone_bytes=alone_bytes,
    )
    by_place = {each.place: each for each in parameters}
    inside = [tuple(by_place[index] for index in bucket.indices) for bucket in planned]
    return tuple(
        Bucket(number, members, bucket.numel * members[0].itemsize)
        for number, (bucket, members) in enumerate(zip(planned, inside, strict=True))
    )
