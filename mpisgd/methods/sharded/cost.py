"""What `Sharded` takes: a reduce-scatter of each bucket, an update of a share, an all-gather; and FSDP2.

Source of the shares: ZeRO, Rajbhandari, Rasley, Ruwase and He 2020, section 3 and figure 1. For Psi
parameters on N ranks with 16-bit parameters and gradients, and an optimizer of K bytes for each of them:

    none  (2 + 2 + K) Psi     P_os  (2 + 2) Psi + K Psi / N     P_os+g  2 Psi + (2 + K) Psi / N
    P_os+g+p  (2 + 2 + K) Psi / N
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mpisgd.arguments import check_flag
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.bucketing import join_buckets
from mpisgd.methods.block_quantized.block_quantized import BlockQuantized
from mpisgd.methods.coding import dtype_of
from mpisgd.methods.cost_kit import (
    HOST,
    LEADERS,
    Alloc,
    Bucket,
    Check,
    Collective,
    Compute,
    Cycle,
    Disk,
    Free,
    Move,
    Op,
    Parameter,
    Sizes,
    Wait,
    World,
)
from mpisgd.methods.cost_steps import backward_in_buckets, changes_any, kept, trained, update
from mpisgd.methods.offload.cost import block_bytes, layerwise_cost
from mpisgd.methods.sharded.sharded import Sharded
from mpisgd.sharding.division import Item, assign, divide

__all__ = [
    "FullyShard",
    "also_alone",
    "coded_bytes",
    "cost",
    "cycle",
    "largest_load",
    "largest_part",
    "largest_share",
]


def cost(method: Sharded, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step of ZeRO's stages 1 and 2 takes."""
    offload = method.offload
    if offload is not None and "parameters" in offload.parts:
        yield from layerwise_cost(offload, sizes, world, step)
        return
    wire = world.wire.cast_itemsize(sizes.itemsize)
    assert wire is not None  # what it goes with
    states, masters = _states(method, sizes)
    if not step:
        yield from _kept(method, sizes, world, states, masters)
        return

    joined = join_buckets([each.padded_bytes for each in sizes.buckets], sizes.cap_bytes)
    cast = _most([each.padded_bytes for each in sizes.buckets], joined) if wire < sizes.itemsize else 0
    narrow = cast * wire / sizes.itemsize + cast / world.size  # what travels, and this rank's part of the sum
    yield Alloc("compression", narrow)

    def send(bucket: Bucket) -> Iterator[Op]:
        yield Move(0, tensors=len(bucket.parameters))
        yield Check()
        if method.gradients is not None and world.hosts > 1:
            yield from _coded(method.gradients, bucket, world)
        else:
            yield Collective("reduce_scatter", bucket.nbytes * wire // sizes.itemsize, itemsize=wire)

    if world.overlaps:
        yield from backward_in_buckets(sizes, send)
    else:
        yield from trained(sizes)
        for bucket in sizes.buckets:
            yield from send(bucket)
    yield Wait()
    yield Free("compression", narrow)
    if offload is not None and offload.folder is not None:
        yield Disk(2 * largest_part(states, world.size, sizes))
    yield from update(largest_share(world.size, sizes))
    if world.shares and world.hosts == 1:  # the parameters are there for all
        return
    yield Check()
    if method.parameters is not None and world.hosts > 1:
        yield from _coded_parameters(method.parameters, sizes, world)
    else:
        yield Collective("all_gather", sizes.nbytes)
    yield Wait()


def _coded_parameters(parameters: BlockQuantized, sizes: Sizes, world: World) -> Iterator[Op]:
    """Yield what becomes of updated parameters: codes between hosts, and what they stand for on each host."""
    nbytes = sum(coded_bytes(parameters, bucket, world.size) for bucket in sizes.buckets)
    others, numel = (world.hosts - 1) / world.size, sum(bucket.numel for bucket in sizes.buckets)
    yield Compute(
        "compress",
        elements=math.ceil((others + 1 / world.size) * numel),
        arrived_bytes=others * nbytes,
        num_collectives=1,
        by=parameters,
        element_s=parameters.coding().element_s,
    )
    yield Collective("all_gather", nbytes, LEADERS)
    if world.ranks_per_host > 1 and not world.shares:
        yield Collective("all_gather", sizes.nbytes, HOST)


def _coded(gradients: BlockQuantized, bucket: Bucket, world: World) -> Iterator[Op]:
    """Yield what becomes of a bucket: sums on each host, and codes of them between hosts."""
    if world.ranks_per_host > 1:
        yield Collective("reduce_scatter", bucket.nbytes, HOST, bucket.itemsize)
    nbytes, others = coded_bytes(gradients, bucket, world.size), (world.hosts - 1) / world.size
    yield Compute(
        "compress",
        elements=math.ceil(others * bucket.numel),
        arrived_bytes=others * nbytes,
        num_collectives=1,
        by=gradients,
        element_s=gradients.coding().element_s,
    )
    yield Collective("all_to_all", nbytes, LEADERS)


@lru_cache(maxsize=4096)
def coded_bytes(gradients: BlockQuantized, bucket: Bucket, size: int) -> int:
    """Return the bytes of the codes of the shards of a bucket that so many ranks have."""
    items = [Item(each.place, each.numel, each.itemsize, (0, "", False)) for each in bucket.parameters]
    dtype = dtype_of(max(4, bucket.itemsize))  # of sums
    shards = (
        [member.numel for piece in of_one for member in piece.members]
        for of_one in divide(items, (), size, sys.maxsize)
    )
    return sum(gradients.code_of(lengths, dtype).nbytes for lengths in shards)


def also_alone(method: Sharded) -> bool:
    """Return whether one rank, too, has something in files."""
    return method.offload is not None


def cycle(method: Sharded, world: World) -> Cycle:
    """Return any step."""
    return Cycle()


def _states(method: Sharded, sizes: Sizes) -> tuple[list[int], list[int]]:
    """Return the bytes of each parameter's state, and those of its copy in a higher precision."""
    dtype = method.master_dtype
    if method.parameters is not None:  # masters, and what was written last
        return [each.state_bytes for each in sizes.parameters], [2 * each.nbytes for each in sizes.parameters]
    if dtype is None or dtype.itemsize <= sizes.itemsize:
        return [each.state_bytes for each in sizes.parameters], [0 for _ in sizes.parameters]
    wider = dtype.itemsize // sizes.itemsize
    return [each.state_bytes * wider for each in sizes.parameters], [
        each.nbytes * wider for each in sizes.parameters
    ]


def _kept(
    method: Sharded, sizes: Sizes, world: World, states: Sequence[int], masters: Sequence[int]
) -> Iterator[Op]:
    gradients = sizes.nbytes
    fused = [each.padded_bytes if each.packed_bytes else 0 for each in sizes.buckets]
    buffers = sum(fused)
    if method.stage == 2:
        sent = [each.padded_bytes for each in sizes.buckets]
        gradients = largest_part([each.nbytes for each in sizes.parameters], world.size, sizes)
        # Those that travel together lie in one place, and are whole until they have.
        joined = join_buckets(sent, sizes.cap_bytes)
        buffers = _most(fused, joined) + _most(sent, joined)
    if (offload := method.offload) is not None and offload.folder is not None:
        state = block_bytes(offload) + largest_part(masters, world.size, sizes)
    else:
        both = [one + other for one, other in zip(states, masters, strict=True)]
        state = largest_part(both, world.size, sizes)
    share = 1 / world.ranks_per_host if world.shares else 1.0
    yield from kept(sizes, parameters=share, gradients=gradients, state=state)
    yield Alloc("buffers", buffers)


def _most(sizes: Sequence[int], joined: Sequence[Sequence[int]]) -> int:
    return max((sum(sizes[place] for place in places) for places in joined), default=0)


def largest_part(each: Sequence[int], number: int, sizes: Sizes) -> int:
    """Return the largest of so many parts: an n-th, or whole parameters where they are not cut.

    Args:
        each: what there is of each parameter.
        number: of parts.
        sizes: of the model.
    """
    whole = [
        (item, size) for item, size in zip(sizes.parameters, each, strict=True) if _is_whole(item, sizes)
    ]
    known = any(item.work is not None for item, _ in whole)
    held = [size for _, size in whole]
    work = [_work(item) for item, _ in whole] if known else held
    return largest_load(held, number, work) + -(-(sum(each) - sum(held)) // number)


def largest_load(each: Sequence[int], number: int, work: Sequence[float] | None = None) -> int:
    """Return the most that one of so many owners of whole parameters has.

    Args:
        each: what there is of each parameter.
        number: of owners.
        work: by which they are divided; by `each` if it is not given.
    """
    loads = [0] * number
    for owner, size in zip(assign(each if work is None else work, loads), each, strict=True):
        loads[owner] += size
    return max(loads)


def largest_share(number: int, sizes: Sizes) -> float:
    """Return the largest part of the optimizer's work that one of so many ranks has."""
    work = [math.ceil(_work(item)) for item in sizes.parameters]
    if all(item.work is None for item in sizes.parameters) or not sum(work):
        return 1 / number
    return largest_part(work, number, sizes) / sum(work)


def _is_whole(item: Parameter, sizes: Sizes) -> bool:
    return not sizes.cuts or item.work is not None


def _work(item: Parameter) -> float:
    return item.nbytes if item.work is None else item.work


@dataclass(frozen=True)
class FullyShard:
    """torch's FSDP2, ZeRO's stage 3: parameters are divided, too, and gathered for each layer's turn.

    Attributes:
        reshard_after_forward: whether they are gathered again for the backward pass.
    """

    reshard_after_forward: bool = True

    def __post_init__(self) -> None:
        check_flag("FullyShard", "reshard_after_forward", self.reshard_after_forward)

    def cost(self, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
        """Yield what a step takes: a layer's parameters are gathered while the one before computes."""
        again = self.reshard_after_forward
        if changes_any(sizes, world):
            raise InvalidArgument(f"plan: {self} with a compression; expected none")
        if not step:
            yield from self._kept(sizes, world)
            return

        yield Alloc("activations", sizes.activation_bytes)
        for bucket in reversed(sizes.buckets):
            gathered = Collective("all_gather", bucket.nbytes, after=())  # ahead of the layer
            yield from (Check(after=()), gathered)
            yield Compute("forward", bucket=bucket, after=(gathered,))
        for bucket in sizes.buckets:
            gathered = Collective("all_gather", bucket.nbytes, after=())
            if again:
                yield from (Check(after=()), gathered)
            is_last = bucket is sizes.buckets[-1]
            yield Compute(
                "backward", bucket=None if is_last else bucket, after=(gathered,) if again else None
            )
            yield Check()
            yield Collective("reduce_scatter", bucket.nbytes, itemsize=bucket.itemsize)
        yield Free("activations", sizes.activation_bytes)
        yield Wait()
        yield from update(1 / world.size)

    def _kept(self, sizes: Sizes, world: World) -> Iterator[Op]:
        parts = [each.nbytes for each in sizes.parameters], [each.state_bytes for each in sizes.parameters]
        shard, state = (-(-sum(each) // world.size) for each in parts)
        yield from kept(sizes, parameters=1 / world.size, gradients=shard, state=state)
        largest = max((bucket.nbytes for bucket in sizes.buckets), default=0)
        # While a layer computes, the next one is gathered; and the gradients of one are scattered.
        yield Alloc("buffers", largest + (2 * largest if self.reshard_after_forward else sizes.nbytes))
