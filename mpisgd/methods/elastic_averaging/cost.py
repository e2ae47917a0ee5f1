"""What `ElasticAveraging` takes: every `every` steps the mean of the differences from the centre."""

from collections.abc import Iterator

from mpisgd.methods.cost_kit import Alloc, Free, Move, Op, Sizes, World
from mpisgd.methods.cost_steps import kept, mean_of_parameters, unsent_step
from mpisgd.methods.elastic_averaging.elastic_averaging import ElasticAveraging

__all__ = ["cost"]


def cost(method: ElasticAveraging, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes."""
    residual = sum(world.wire.kept_bytes(each, world) for each in sizes.packed)
    if not step:
        yield from kept(sizes)
        # The centre; with a residual also what has arrived, and the parameters at the last exchange.
        yield Alloc("strategy", (3 if residual else 1) * sizes.nbytes)
        yield Alloc("compression", residual)
        return
    yield from unsent_step(sizes)
    if step % method.every == 0:
        fresh = (2 if residual else 1) * sizes.nbytes  # with a residual what travels are changes
        yield Alloc("strategy", fresh)
        yield Move(6 * sizes.nbytes, "differences", fresh_bytes=sizes.nbytes)
        yield from mean_of_parameters(sizes, world, step)
        yield Move(3 * sizes.nbytes, "centre")
        yield Free("strategy", fresh)
