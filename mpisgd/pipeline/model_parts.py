"""What a user gives as stages: modules, functions that make them, or one `nn.Sequential`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument
from mpisgd.pipeline.balance import balance

__all__ = ["Stages", "Tied", "build_stages", "check_tied", "split", "tied_by_identity", "unify_tied"]

Stages = nn.Sequential | Sequence[nn.Module | Callable[[], nn.Module]]
Tied = tuple[tuple[int, str], ...]  # of one parameter: (stage, name in its module)


def split(module: nn.Sequential, parts: int | Sequence[int]) -> list[nn.Sequential]:
    """Divide a model into stages; layers keep their names, so state dicts of stages can be joined.

    Args:
        module: a sequence of layers.
        parts: number of stages, which get about equal numbers of parameters; or the number of layers of each
            stage.

    Raises:
        InvalidArgument: fewer layers than stages, or a number of layers other than the sum of `parts`.
    """
    if not isinstance(module, nn.Sequential):
        raise InvalidArgument(f"split: module is a {type(module).__name__}; expected an nn.Sequential")
    layers = list(module.named_children())
    sizes = _even_sizes(module, parts) if isinstance(parts, int) else list(parts)
    if sum(sizes) != len(layers) or min(sizes, default=0) < 1:
        raise InvalidArgument(
            f"split: parts={parts} of {len(layers)} layers; expected a layer or more each, and all of them"
        )
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    return [_named_sequential(layers[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def _even_sizes(module: nn.Sequential, num_stages: int) -> list[int]:
    if not 1 <= num_stages <= len(module):
        raise InvalidArgument(f"split: {len(module)} layers in {num_stages} stages; have a layer for each")
    # A layer without parameters is a little work, too.
    costs = [1.0 + sum(param.numel() for param in layer.parameters()) for layer in module]
    return balance(costs, num_stages)


def _named_sequential(layers: Iterable[tuple[str, nn.Module]]) -> nn.Sequential:
    part = nn.Sequential()
    for name, layer in layers:
        part.add_module(name, layer)
    return part


def build_stages(stages: Sequence[Any], own: Iterable[int]) -> dict[int, nn.Module]:
    """Return the modules of these stages; functions are called for them alone.

    Raises:
        InvalidArgument: a stage is neither a module nor a function that returns one.
    """
    return {number: _built(number, stages[number]) for number in own}


def _built(number: int, stage: Any) -> nn.Module:
    module = stage if isinstance(stage, nn.Module) or not callable(stage) else stage()
    if not isinstance(module, nn.Module):
        raise InvalidArgument(
            f"pipeline: stage {number} is {shown(module)}; expected a module, or a function that returns one"
        )
    return module


def tied_by_identity(stages: Sequence[Any]) -> list[Tied]:
    """Return the parameters that several of the stages have, as far as these are modules."""
    places: dict[int, dict[int, str]] = {}
    for number, stage in enumerate(stages):
        if isinstance(stage, nn.Module):
            for name, param in stage.named_parameters():
                places.setdefault(id(param), {})[number] = name
    return [tuple(found.items()) for found in places.values() if len(found) > 1]


def check_tied(tied: Any, num_stages: int) -> list[Tied]:
    """Check what a user gives as tied parameters, and return it as a list.

    Raises:
        InvalidArgument: it has another form, or names a stage that there is not.
    """
    checked: list[Tied] = []
    for places in tied:
        good = isinstance(places, Sequence) and all(
            isinstance(place, Sequence) and len(place) == 2 and place[0] in range(num_stages)
            for place in places
        )
        if not good or len({stage for stage, _ in places}) != len(places) or len(places) < 2:
            raise InvalidArgument(
                f"pipeline: tied has {shown(places)}; expected (stage, parameter) pairs of several stages, "
                'as in ((0, "weight"), (3, "head.weight"))'
            )
        checked.append(tuple((int(stage), str(name)) for stage, name in places))
    return checked


class _Place(NamedTuple):
    module: nn.Module
    name: str


def unify_tied(tied: Tied, modules: Mapping[int, nn.Module]) -> list[nn.Parameter]:
    """Make the parameters of a tie that this rank has one and the same; return it in a list, or none.

    Raises:
        InvalidArgument: a module has no parameter of that name.
    """
    places = [_find(stage, modules[stage], name) for stage, name in tied if stage in modules]
    if not places:
        return []
    param = getattr(*places[0])
    for place in places[1:]:
        setattr(place.module, place.name, param)
    return [param]


def _find(stage: int, module: nn.Module, name: str) -> _Place:
    owner, _, last = name.rpartition(".")
    try:
        holder = module.get_submodule(owner)
    except AttributeError:
        holder = None
    if holder is None or not isinstance(getattr(holder, last, None), nn.Parameter):
        raise InvalidArgument(f"pipeline: stage {stage} has no parameter {name!r}, which tied names")
    return _Place(holder, last)
