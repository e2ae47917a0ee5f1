"""What costs of methods share: a step without communication, means of gradients and of parameters."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from mpisgd.methods.cost_kit import (
    ALL,
    Alloc,
    Bucket,
    Check,
    Collective,
    Compute,
    Free,
    Move,
    Op,
    Sizes,
    Wait,
    World,
)

__all__ = [
    "arrived_mean",
    "backward_in_buckets",
    "changes_any",
    "kept",
    "mean_of_parameters",
    "reduced",
    "trained",
    "unsent_step",
    "update",
]


def kept(
    sizes: Sizes, *, parameters: float = 1.0, gradients: int | None = None, state: int | None = None
) -> Iterator[Op]:
    """Yield what a rank has of the model: a share of the parameters; gradients and state, by default all."""
    yield Alloc("parameters", (sizes.nbytes + sizes.frozen_bytes) * parameters + sizes.module_bytes)
    yield Alloc("gradients", sizes.nbytes if gradients is None else gradients)
    yield Alloc("optimizer", sizes.state_bytes if state is None else state)


def unsent_step(sizes: Sizes) -> Iterator[Op]:
    """Yield a step without communication."""
    yield from trained(sizes)
    yield from update()


def trained(sizes: Sizes) -> Iterator[Op]:
    """Yield forward and backward in one."""
    yield Alloc("activations", sizes.activation_bytes)
    yield Compute("forward, backward")
    yield Free("activations", sizes.activation_bytes)


def update(share: float = 1.0) -> Iterator[Op]:
    """Yield the optimizer's update of a share of the parameters."""
    yield Compute("optimizer", share)


def backward_in_buckets(sizes: Sizes, send: Callable[[Bucket], Iterable[Op]]) -> Iterator[Op]:
    """Yield forward and backward, and what `send` does with each bucket as it becomes complete."""
    yield Alloc("activations", sizes.activation_bytes)
    yield Compute("forward")
    for bucket in sizes.buckets:
        yield Compute("backward", bucket=bucket)
        yield from send(bucket)
    yield Compute("backward")
    yield Free("activations", sizes.activation_bytes)


def reduced(sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield forward and backward, and the mean of the gradients; see `mpisgd.gradients`."""

    def send(bucket: Bucket) -> Iterator[Op]:
        yield Move(2 * bucket.packed_bytes, tensors=len(bucket.parameters))
        yield Check()
        yield from world.wire.cost(bucket, world, step)

    if world.overlaps:
        yield from backward_in_buckets(sizes, send)
    else:
        yield from trained(sizes)
        packed = sum(each.packed_bytes for each in sizes.buckets)
        yield Move(2 * packed, tensors=len(sizes.parameters))
        yield Check()
        for bucket in sizes.buckets:
            yield from world.wire.cost(bucket, world, step)
    yield Wait()


def mean_of_parameters(
    sizes: Sizes, world: World, step: int, *, group: str = ALL, key: str | None = None
) -> Iterator[Op]:
    """Yield the mean of all parameters, or of their changes; see `mpisgd.methods.strategy.tensor_mean`.

    Args:
        sizes: of the parameters.
        world: the ranks.
        step: its number.
        group: whose mean; on a host nothing is compressed.
        key: yield the beginning alone: what comes of it is waited for by this.
    """
    packed = sizes.packed if group == ALL and changes_any(sizes, world) else ()
    fresh = sizes.nbytes if packed else sizes.small_bytes
    yield Alloc("strategy", fresh)
    for bucket in packed:
        yield Move(2 * bucket.nbytes)
        yield Check()
        for op in world.wire.cost(bucket, world, step):
            yield replace(op, key=key or "") if isinstance(op, Collective) else op
        if key is None:
            yield Wait()
            yield Move(2 * bucket.nbytes)
    if not packed:
        yield Move(2 * fresh, tensors=len(sizes.parameters))
        yield Check(group)
        for nbytes in sizes.messages:
            yield Collective("all_reduce", nbytes, group, sizes.itemsize, key or "")
    if key is None:
        yield from arrived_mean(sizes, world, group=group)


def arrived_mean(sizes: Sizes, world: World, *, group: str = ALL, key: str = "") -> Iterator[Op]:
    """Yield the end of such a mean."""
    packed = group == ALL and changes_any(sizes, world)
    fresh = sizes.nbytes if packed else sizes.small_bytes
    yield Wait(key)
    if key or not packed:
        yield Move(2 * fresh)
    yield Free("strategy", fresh)


def changes_any(sizes: Sizes, world: World) -> bool:
    """Return whether any parameter would travel as something else."""
    return any(world.wire.changes(each.itemsize) for each in sizes.parameters)
