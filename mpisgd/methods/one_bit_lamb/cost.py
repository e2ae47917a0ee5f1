"""What `OneBitLamb` takes: as `OneBitAdam`, with a third moment and a copy of the momentum."""

from collections.abc import Iterator, Mapping
from typing import Any

from mpisgd.methods.cost_kit import Alloc, Free, Op, Sizes, World
from mpisgd.methods.one_bit_adam import cost as one_bit_adam
from mpisgd.methods.one_bit_adam.cost import cycle

__all__ = ["cost", "cycle"]


def cost(options: Mapping[str, Any], sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step of an optimizer with these options takes."""
    if not step:
        yield from one_bit_adam.start(sizes, world, moments=3)
        return
    earlier = sizes.nbytes if step > options["freeze_step"] else 0
    yield Alloc("strategy", earlier)
    yield from one_bit_adam.cost(options, sizes, world, step)
    yield Free("strategy", earlier)
