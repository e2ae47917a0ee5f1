"""What `OneBitAdam` takes: the mean of the gradients, then the two-step exchange of the momentum."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mpisgd.methods.coding import Coded
from mpisgd.methods.cost_kit import (
    Alloc,
    Bucket,
    Check,
    Collective,
    Cycle,
    Free,
    Move,
    Op,
    Parameter,
    Sizes,
    Wait,
    World,
)
from mpisgd.methods.cost_steps import kept, reduced, trained, update
from mpisgd.methods.one_bit.one_bit import OneBit
from mpisgd.methods.two_step.cost import CODING

__all__ = ["cost", "cycle", "exchanged", "start"]

WIRE = Coded(OneBit(two_step=True), CODING)


def cost(options: Mapping[str, Any], sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step of an optimizer with these options takes."""
    if not step:
        yield from start(sizes, world)
    elif step <= options["freeze_step"]:
        yield from reduced(sizes, world, step)
        yield from update()
    else:
        yield from trained(sizes)
        yield from exchanged(sizes, world, step)
        yield from update()


def start(sizes: Sizes, world: World, moments: int = 2) -> Iterator[Op]:
    """Yield what a rank keeps: so many moments, and both errors of the exchange."""
    own = tuple(each._replace(state_bytes=moments * each.nbytes) for each in sizes.parameters)
    yield from kept(replace(sizes, parameters=own))
    yield Alloc("buffers", sum(each.padded_bytes for each in sizes.buckets if each.packed_bytes))
    yield Alloc("compression", sum(each.numel for each in sizes.parameters) * 4 * (1 + 1 / world.size))


def exchanged(sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield a byte for each parameter, whether any rank has its gradient, and the exchange of all as one."""
    yield Check()
    yield Collective("all_reduce", len(sizes.parameters))
    yield Wait()
    for itemsize in sorted({each.itemsize for each in sizes.parameters}):
        alike = [each for each in sizes.parameters if each.itemsize == itemsize]
        bucket = Bucket(0, tuple(sorted(alike, key=_place)))
        flat = bucket.numel * max(4, itemsize)
        yield Alloc("strategy", flat)
        yield Move(2 * bucket.nbytes, tensors=len(alike))
        yield Check()
        yield from WIRE.cost(bucket, world, step)
        yield Wait()
        yield Move(2 * bucket.nbytes)
        yield Free("strategy", flat)


def _place(parameter: Parameter) -> int:
    return parameter.place


def cycle(options: Mapping[str, Any], world: World) -> Cycle:
    """Return any step after the freeze."""
    return Cycle(options["freeze_step"])
