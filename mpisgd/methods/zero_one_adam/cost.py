"""What `ZeroOneAdam` takes: ever fewer means of gradients, and 1-bit averages where the ranks meet."""

from collections.abc import Iterator, Mapping
from typing import Any

from mpisgd.methods.cost_kit import Cycle, Op, Sizes, World
from mpisgd.methods.cost_steps import reduced, trained, update
from mpisgd.methods.one_bit_adam.cost import exchanged, start
from mpisgd.methods.zero_one_adam.zero_one_adam import is_variance_step, local_interval

__all__ = ["cost", "cycle"]

MOMENTS = 4  # momentum, variance, what steps add up to, and the parameters at the last meeting


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
            scaler, clipper = options["local_step_scaler"], options["local_step_clipper"]
            interval = local_interval(frozen, scaler, clipper)
        if frozen <= 0 or frozen % interval == 0:
            yield from exchanged(sizes, world, step)
        yield from update()


def cycle(options: Mapping[str, Any], world: World) -> Cycle:
    """Return the steps between two meetings, when they are furthest apart."""
    clipper, scaler = options["local_step_clipper"], options["local_step_scaler"]
    last = options["var_freeze_step"] + scaler * clipper.bit_length()
    return Cycle(last, clipper)
