"""What `Dion` takes: factors of r m and of r n words of each matrix [m, n], and the gradients of the rest."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mpisgd.methods.cost_kit import (
    Alloc,
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
from mpisgd.methods.cost_steps import kept, trained, update
from mpisgd.methods.dion.dion import rank_of

__all__ = ["cost", "cycle"]

WIDE = 4  # bytes of an element of a factor, at the least


def cost(options: Mapping[str, Any], sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield what a step of an optimizer with these options takes; all matrices are taken for its own."""
    fraction = options["rank_fraction"]
    matrices = [each for each in sizes.parameters if len(each.shape) == 2]
    rest = [each for each in sizes.parameters if len(each.shape) != 2]
    if not step:
        own = tuple(each._replace(state_bytes=_state_bytes(each, fraction)) for each in sizes.parameters)
        yield from kept(replace(sizes, parameters=own))
        return
    yield from trained(sizes)
    yield Check()
    yield Collective("all_reduce", len(sizes.parameters))
    yield Wait()
    lefts = [_factor_bytes(each, 0, fraction) for each in matrices]
    left, largest = sum(lefts), max(lefts, default=0)
    right = sum(_factor_bytes(each, 1, fraction) for each in matrices)
    yield Alloc("strategy", left)
    yield Move(sum(3 * each.nbytes for each in matrices), tensors=len(matrices))  # B, and B Q
    yield Check()
    yield Collective("all_reduce", left + sum(each.nbytes for each in rest))
    yield Wait()
    yield Alloc("strategy", largest)  # a basis beside what it is of
    yield Free("strategy", largest)
    yield Alloc("strategy", right)
    yield Move(sum(each.nbytes for each in matrices))  # B^T P
    yield Check()
    yield Collective("all_reduce", right)
    yield Wait()
    yield from update()
    yield Free("strategy", left + right)


def _factor_bytes(parameter: Parameter, dim: int, fraction: float) -> int:
    """Return the bytes of a factor with as many rows as a dimension of a matrix."""
    return parameter.shape[dim] * rank_of(parameter.shape, fraction) * max(WIDE, parameter.itemsize)


def _state_bytes(parameter: Parameter, fraction: float) -> int:
    """Return those of AdamW's moments, or of the momentum of a matrix and its right factor."""
    if len(parameter.shape) != 2:
        return 2 * parameter.nbytes
    return parameter.nbytes + parameter.shape[1] * rank_of(parameter.shape, fraction) * parameter.itemsize


def cycle(options: Mapping[str, Any], world: World) -> Cycle:
    """Return any step."""
    return Cycle()
