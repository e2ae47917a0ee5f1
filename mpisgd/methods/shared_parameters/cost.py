"""What synchronous steps take with one copy of the parameters per host: its ranks update pieces."""

from collections.abc import Iterator

from mpisgd.methods.cost_kit import Alloc, Check, Collective, Op, Sizes, Wait, World
from mpisgd.methods.cost_steps import changes_any, kept, trained, update
from mpisgd.methods.sharded.cost import largest_part, largest_share

__all__ = ["cost"]


def cost(sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes."""
    number = world.ranks_per_host
    if not step:
        state = largest_part([each.state_bytes for each in sizes.parameters], number, sizes)
        yield from kept(sizes, parameters=1 / number, state=state)
        if changes_any(sizes, world):
            yield Alloc("buffers", sum(each.padded_bytes for each in sizes.buckets if each.packed_bytes))
            yield Alloc("compression", sum(world.wire.kept_bytes(each, world) for each in sizes.buckets))
        return
    yield from trained(sizes)
    yield Check()
    if changes_any(sizes, world):
        for bucket in sizes.buckets:
            yield from world.wire.cost(bucket, world, step)
    else:  # on one host nothing has to come back: the parameters are there for all
        kind = "all_reduce" if world.hosts > 1 else "reduce_scatter"
        for nbytes in sizes.messages:
            yield Collective(kind, nbytes, itemsize=sizes.itemsize)
    yield Wait()
    yield from update(largest_share(number, sizes))
    yield Check()
    yield Wait()
