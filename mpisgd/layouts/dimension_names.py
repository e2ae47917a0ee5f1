"""The names of the dimensions of a model's tensors: a table that the user writes, resolved and checked."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import Tensor, nn

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument
from mpisgd.layouts.rules import Dims, LayoutRules, Rule, dims_text

__all__ = ["DimensionNames", "resolve_names"]


@dataclass(frozen=True)
class DimensionNames:
    """The dimension names of one model's tensors.

    Attributes:
        tensors: of parameters and buffers, by name; what is not listed is copied to all ranks.
        modules: of what modules return; "" is the model itself.
        inputs: of the positional arguments of the model's forward.
        shapes: of the tensors.
    """

    tensors: dict[str, tuple[str | None, ...]]
    modules: dict[str, tuple[str | None, ...]]
    inputs: tuple[tuple[str | None, ...], ...]
    shapes: dict[str, tuple[int, ...]]

    def __iter__(self) -> Iterator[tuple[str, tuple[str | None, ...]]]:
        """All tensors that have names, with what messages call them."""
        yield from self.tensors.items()
        yield from ((f"the output of {name or 'the model'}", dims) for name, dims in self.modules.items())
        yield from ((f"input {place}", dims) for place, dims in enumerate(self.inputs))

    @property
    def names(self) -> list[str]:
        """Every name, once, as they first appear."""
        return list(dict.fromkeys(dim for _, dims in self for dim in dims if dim is not None))

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each name that a parameter or a buffer has."""
        pairs = ((dims, self.shapes[name]) for name, dims in self.tensors.items())
        return {dim: size for dims, shape in pairs for dim, size in zip(dims, shape, strict=True) if dim}

    def check(self, rules: LayoutRules) -> None:
        """Raise InvalidArgument unless the layout is legal for this model, as far as its shapes are known."""
        rules.check_known(self.names)
        for what, dims in self:
            rules.check(what, dims, self.shapes.get(what))

    def check_call(self, rules: LayoutRules, what: str, dims: Dims, shape: Sequence[int]) -> None:
        """Raise InvalidArgument unless a tensor of this call fits its names and the layout."""
        rules.check(what, dims, shape)
        sizes = self.sizes
        for dim, size in zip(dims, shape, strict=True):
            if dim is not None and sizes.get(dim, size) != size:
                raise rules.broken(
                    Rule.ONE_SIZE, f"{dim} has the size {size} in {what}, and {sizes[dim]} in the parameters"
                )


def resolve_names(
    model: nn.Module, names: Mapping[str, Dims], inputs: Sequence[Dims] | Dims, outputs: Dims | None
) -> DimensionNames:
    """Return the names of a model's tensors, from a table in which `*` stands for one part of a dotted name.

    Args:
        model: unchanged.
        names: of parameters and buffers, and of what modules return. The first entry that fits counts.
        inputs: of each positional argument of forward; of one argument, it may be the names themselves.
        outputs: of what the model returns.

    Raises:
        InvalidArgument: an entry fits nothing, has another number of names than a tensor has dimensions, or
            gives one name to dimensions of different sizes.
    """
    tensors = dict(_named_tensors(model))
    modules = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    table = {_check_key(key): _check_dims(key, dims) for key, dims in names.items()}
    for key in table:
        if not any(_fits(key, name) for name in [*tensors, *modules]):
            raise InvalidArgument(f"layout: names has {key!r}, {_nearest(key, [*tensors, *modules])}")
    found = DimensionNames(
        tensors=_share_between_aliases(_look_up(table, tensors), tensors),
        modules=_look_up(table, modules) | ({} if outputs is None else {"": _check_dims("outputs", outputs)}),
        inputs=tuple(_check_dims("inputs", dims) for dims in _listed(inputs)),
        shapes={name: tuple(tensor.shape) for name, tensor in tensors.items()},
    )
    _check_sizes(found)
    return found


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _fits(key: str, name: str) -> bool:
    """Return whether a table's key stands for `name`: `blocks.*` for `blocks.0`, not for `blocks.0.up`."""
    parts, patterns = name.split("."), key.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _look_up(
    table: Mapping[str, tuple[str | None, ...]], names: Mapping[str, Tensor] | Sequence[str]
) -> dict[str, tuple[str | None, ...]]:
    found = {}
    for name in names:
        dims = next((dims for key, dims in table.items() if _fits(key, name)), None)
        if dims is not None:
            found[name] = dims
    return found


def _share_between_aliases(
    found: dict[str, tuple[str | None, ...]], tensors: Mapping[str, Tensor]
) -> dict[str, tuple[str | None, ...]]:
    """Give all names of a tied parameter the dimensions of the one that is in the table."""
    of_tensor: dict[int, tuple[str, tuple[str | None, ...]]] = {}
    for name, dims in found.items():
        other, others = of_tensor.setdefault(id(tensors[name]), (name, dims))
        if others != dims:
            raise InvalidArgument(
                f"layout: {other} and {name} are one tensor, but have the names [{dims_text(others)}] and "
                f"[{dims_text(dims)}]"
            )
    return {name: of_tensor[id(tensor)][1] for name, tensor in tensors.items() if id(tensor) in of_tensor}


def _check_sizes(found: DimensionNames) -> None:
    first: dict[str, tuple[int, str]] = {}
    for what, dims in found.tensors.items():
        shape = found.shapes[what]
        if len(shape) != len(dims):
            raise InvalidArgument(
                f"layout: {what} has {len(shape)} dimensions, {list(shape)}, and {len(dims)} names, "
                f"[{dims_text(dims)}]"
            )
        for dim, size in zip(dims, shape, strict=True):
            known, where = first.setdefault(dim, (size, what)) if dim is not None else (size, what)
            if known != size:
                raise InvalidArgument(
                    f"layout: {dim} has the size {size} in {what}, and {known} in {where}; the rule: "
                    f"{Rule.ONE_SIZE.value}"
                )


def _listed(inputs: Sequence[Dims] | Dims) -> Sequence[Dims]:
    if not isinstance(inputs, Sequence):
        raise InvalidArgument(f"layout: inputs={shown(inputs)}; expected names such as ('batch', 'hidden')")
    one = not isinstance(inputs, str) and all(dim is None or isinstance(dim, str) for dim in inputs)
    return [inputs] if inputs and one else inputs  # type: ignore[list-item,return-value]


def _check_key(key: str) -> str:
    if not isinstance(key, str) or not key:
        raise InvalidArgument(
            f"layout: names has the key {shown(key)}; expected the name of a parameter or module"
        )
    return key


def _check_dims(what: str, dims: Dims) -> tuple[str | None, ...]:
    valid = isinstance(dims, Sequence) and not isinstance(dims, str)
    if not valid or not all(dim is None or (isinstance(dim, str) and dim) for dim in dims):
        raise InvalidArgument(f"layout: {what} has {shown(dims)}; expected names such as ('batch', 'hidden')")
    return tuple(dims)


def _nearest(key: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
    return (
        f"which is no parameter, buffer or module; the nearest is {near[0]!r}" if near else "but nothing else"
    )
