"""What `SparseLoCo` takes: what `DiLoCo` does with changes that `ChunkTopK` sends."""

from collections.abc import Iterator

from mpisgd.methods.coding import Coded
from mpisgd.methods.cost_kit import Cycle, Op, Sizes, World
from mpisgd.methods.diloco import cost as diloco
from mpisgd.methods.sparse_loco.sparse_loco import SparseLoCo

__all__ = ["cost", "cycle"]


def cost(method: SparseLoCo, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step takes."""
    sent = method.own_compression
    yield from diloco.cost(method.outer, sizes, world._replace(wire=Coded(sent, sent.coding())), step)


def cycle(method: SparseLoCo, world: World) -> Cycle:
    """Return as many steps as from one outer step to the next."""
    return diloco.cycle(method.outer, world)
