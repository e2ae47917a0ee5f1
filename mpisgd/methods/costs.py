"""`cost_of` and `wire_of`: the cost of a strategy, of an optimizer that averages by itself, of a compressor.

It is the `cost.py` beside the module in which a description is defined. One of a user's own has its cost with
it: a method `cost(sizes, world, step)`; which steps stand for all is found in it, or said by a method
`cycle(world)`; what is there before the first step follows from what the strategy `keeps`. A compressor has a
method `coding()`, or none if its bytes are gathered by all ranks.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from mpisgd.compress.compressor import Compressor
from mpisgd.errors import InvalidArgument
from mpisgd.method_state import begins_of
from mpisgd.methods.coding import Coded, Coding
from mpisgd.methods.cost_cycle import found_cycle
from mpisgd.methods.cost_kit import Alloc, Cycle, Op, Sizes, Wire, World
from mpisgd.methods.cost_steps import kept, unsent_step

__all__ = ["MethodCost", "cost_of", "wire_of"]

ROOM = "mpisgd.methods."


class MethodCost(NamedTuple):
    """What a method takes, among however many ranks.

    Attributes:
        steps: its `cost`, of sizes, ranks and a step.
        in_cycle: its `cycle`, of ranks.
        also_alone: whether it is another than training without communication if there is one rank.
    """

    steps: Callable[[Sizes, World, int], Iterator[Op]]
    in_cycle: Callable[[World], Cycle]
    also_alone: bool = False

    def cost(self, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
        """Yield what a step takes; a rank alone trains without communication, by almost all methods."""
        if world.size > 1 or self.also_alone:
            yield from self.steps(sizes, world, step)
        elif step:
            yield from unsent_step(sizes)
        else:
            yield from kept(sizes)

    def cycle(self, world: World) -> Cycle:
        """Return the steps that stand for all."""
        return self.in_cycle(world) if world.size > 1 else Cycle()


def cost_of(
    strategy: Any, optimizer: type | None = None, options: Mapping[str, Any] | None = None
) -> MethodCost:
    """Return the cost of a strategy, or of an optimizer that averages by itself.

    Args:
        strategy: a description.
        optimizer: the class of one that averages by itself; any other: what the strategy does counts.
        options: what it is made with.

    Raises:
        InvalidArgument: it has none.
    """
    if optimizer is not None and (module := _cost_module(optimizer)):
        parameters = inspect.signature(optimizer).parameters.values()
        defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        given = {**defaults, **(options or {})}
        return MethodCost(partial(module.cost, given), partial(module.cycle, given))
    if hasattr(strategy, "cost"):
        steps = partial(_with_kept, strategy)
        return MethodCost(steps, getattr(strategy, "cycle", partial(found_cycle, strategy, steps)))
    if (module := _cost_module(type(strategy))) is None:
        raise InvalidArgument(
            f"plan: {strategy} is not planned; expected a strategy of mpisgd, or one with a method "
            "cost(sizes, world, step), see mpisgd.methods.cost_kit"
        )
    also_alone, steps = (
        getattr(module, "also_alone", lambda _: False)(strategy),
        partial(module.cost, strategy),
    )
    said = partial(module.cycle, strategy) if hasattr(module, "cycle") else None
    return MethodCost(steps, said or partial(found_cycle, strategy, steps), also_alone)


def _with_kept(strategy: Any, sizes: Sizes, world: World, step: int) -> Iterator[Op]:
    """Yield the cost of a strategy; before the first step what it declares to keep, if it declares that."""
    keeps = getattr(strategy, "keeps", None)
    if step or keeps is None:
        yield from strategy.cost(sizes, world, step)
        return
    yield from kept(sizes)
    yield Alloc("strategy", len(begins_of(keeps)) * sizes.nbytes)


def wire_of(compressor: Compressor) -> Wire:
    """Return the cost of a compressor, or of `op=Adasum`."""
    if (module := _cost_module(type(compressor))) is not None:
        wire: Wire = module.wire(compressor, wire_of)
        return wire
    return Coded(compressor, compressor.coding() if hasattr(compressor, "coding") else Coding())


def _cost_module(kind: type) -> Any:
    """Return the `cost.py` beside the definition of a class, or of one that it derives from; None without."""
    return next(filter(None, (_cost_in(base.__module__.rpartition(".")[0]) for base in kind.__mro__)), None)


@cache
def _cost_in(folder: str) -> Any:
    is_there = folder.startswith(ROOM) and find_spec(f"{folder}.cost") is not None
    return import_module(f"{folder}.cost") if is_there else None
