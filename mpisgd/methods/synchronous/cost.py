"""What `Synchronous` takes: the mean of the gradients, then the update."""

from collections.abc import Iterator
from typing import Any

from mpisgd.methods.cost_kit import Alloc, Cycle, Op, Sizes, World
from mpisgd.methods.cost_steps import kept, reduced, update
from mpisgd.methods.shared_parameters import cost as shared_parameters

__all__ = ["cost", "cycle"]


def cost(method: Any, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes."""
    if world.shares:
        yield from shared_parameters.cost(sizes, world, step)
        return
    if not step:
        yield from kept(sizes)
        yield Alloc("buffers", sum(each.padded_bytes for each in sizes.buckets if each.packed_bytes))
        yield Alloc("compression", sum(world.wire.kept_bytes(each, world) for each in sizes.buckets))
        return
    yield from reduced(sizes, world, step)
    yield from update()


def cycle(method: Any, world: World) -> Cycle:
    """Return any step after the compressor's warm-up."""
    return Cycle(world.wire.warmup_steps)
