"""What `ZeroOneAdam` takes: ever fewer means of gradients, and 1-bit averages where the ranks meet."""

from collections.abc import Iterator, Mapping
from typing import Any

from mpisgd.methods.cost_kit import Alloc, Cycle, Free, Op, Sizes, World
from mpisgd.methods.cost_steps import reduced, trained, update
from mpisgd.methods.one_bit_adam.cost import exchanged, start
from mpisgd.methods.zero_one_adam.zero_one_adam import is_variance_step, local_interval

__all__ = ["cost", "cycle"]

MOMENTS = 3  # momentum, variance, and what steps add up to


def cost(options: Mapping[str, Any], sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step of an optimizer with these options takes."""
    frozen = step - options["var_freeze_step"]
    if not step:
        yield from start(sizes, world, MOMENTS)
    elif frozen <= 0 and is_variance_step(step, options["var_update_scaler"]):
        yield from reduced(sizes, world, step)
        yield from update()
    else:
        yield from trained(sizes)
        interval = 1
        if frozen > 0:
            interval = local_interval(frozen, options["local_step_scaler"], options["local_step_clipper"])
        is_alone = frozen > 0 and frozen % interval != 0
        if is_alone and frozen % interval == 1:  # a copy of the parameters at the last meeting
            yield Alloc("optimizer", sizes.nbytes)
        if not is_alone:
            yield from exchanged(sizes, world, step)
        if interval > 1 and not is_alone:
            yield Free("optimizer", sizes.nbytes)
        yield from update()


def cycle(options: Mapping[str, Any], world: World) -> Cycle:
    """Return the steps from one meeting to the next, when they are furthest apart."""
    clipper, scaler = options["local_step_clipper"], options["local_step_scaler"]
    meetings = -(-scaler * clipper.bit_length() // clipper)
    return Cycle(options["var_freeze_step"] + meetings * clipper, clipper)
