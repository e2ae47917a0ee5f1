"""Layout rules as data: which dimension names are divided along which axes of the mesh, and what is legal.

Shazeer and others 2018, "Mesh-TensorFlow: Deep Learning for Supercomputers", sections 3 to 5. The ranks are
the places of a mesh, a grid whose axes have names and lengths. The dimensions of tensors have names, too,
and a layout is a partial map from dimension names to axes, one for all tensors of a program:

    a tensor is divided along the axes of its dimensions, and copied along all other axes
    an operation works on the parts that a rank has; what it sums over a divided dimension is then added up
    over the ranks along that dimension's axis

Such a layout changes where numbers are, and none of the results. The paper's conditions are the members of
`Rule`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import prod
from typing import Any

from mpisgd.arguments import shown
from mpisgd.errors import InvalidArgument

__all__ = ["Dims", "LayoutRules", "Rule", "parse_mesh", "parse_rules"]

Dims = Sequence[str | None]  # the names of a tensor's dimensions; None: without a name, never divided

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Rule(Enum):
    """What makes a layout legal; messages quote it."""

    ONE_AXIS = "a dimension is divided along one axis at most"
    ONE_DIMENSION = "an axis divides one dimension of a tensor at most"
    EVEN = "the length of an axis divides the size of its dimension"
    KNOWN_AXIS = "each rule names an axis of the mesh"
    KNOWN_DIMENSION = "each rule names a dimension of the model"
    ONE_SIZE = "dimensions of one name have one size"
    ALL_RANKS = "the mesh has as many places as the job has ranks"


@dataclass(frozen=True)
class LayoutRules:
    """A layout: plain data, in the same order whatever order it was written in.

    Attributes:
        rules: (dimension, axis) for each divided dimension, by name.
        mesh: (axis, length); neighbouring ranks are along the last axis.
    """

    rules: tuple[tuple[str, str], ...]
    mesh: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(sorted(self.rules)))
        object.__setattr__(self, "mesh", tuple(self.mesh))
        self._check_mesh()
        seen: dict[str, str] = {}
        for dim, axis in self.rules:
            if axis not in self.lengths:
                raise self.broken(
                    Rule.KNOWN_AXIS, f"{dim}:{axis}, but the mesh has {', '.join(self.lengths)}"
                )
            if seen.setdefault(dim, axis) != axis:
                raise self.broken(Rule.ONE_AXIS, f"{dim} is on {seen[dim]} and on {axis}")
        object.__setattr__(self, "rules", tuple(sorted(seen.items())))

    def _check_mesh(self) -> None:
        axes = [axis for axis, _ in self.mesh]
        if not axes:
            raise InvalidArgument("layout: the mesh has no axis; expected text such as 'dp:2, tp:2'")
        if len(set(axes)) < len(axes):
            raise InvalidArgument(f"layout: mesh='{self.mesh_text}' names an axis twice")
        for axis, length in self.mesh:
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise InvalidArgument(
                    f"layout: axis {axis} has the length {shown(length)}; expected 1 or more"
                )

    def __str__(self) -> str:
        return f"'{self.rules_text}' on '{self.mesh_text}'"

    @property
    def rules_text(self) -> str:
        """The rules as `mpisgd.layout` takes them."""
        return "; ".join(f"{dim}:{axis}" for dim, axis in self.rules)

    @property
    def mesh_text(self) -> str:
        """The mesh as `mpisgd.layout` takes it."""
        return ", ".join(f"{axis}:{length}" for axis, length in self.mesh)

    @property
    def text(self) -> str:
        """The call of `mpisgd.layout` that makes it."""
        return f"layout({self.rules_text!r}, {self.mesh_text!r})"

    @property
    def lengths(self) -> dict[str, int]:
        """The length of each axis, in the order of the mesh."""
        return dict(self.mesh)

    @property
    def num_ranks(self) -> int:
        """The number of places of the mesh."""
        return prod(self.lengths.values())

    def divided(self, dims: Dims) -> dict[str, int]:
        """Return the index of the dimension that each axis divides, of the axes that divide one.

        Raises:
            InvalidArgument: `Rule.ONE_DIMENSION` is broken.
        """
        axis_of, found = dict(self.rules), dict[str, int]()
        for index, dim in enumerate(dims):
            axis = None if dim is None else axis_of.get(dim)
            if axis is not None and found.setdefault(axis, index) != index:
                names = f"{dims[found[axis]]} and {dim}"
                raise self.broken(Rule.ONE_DIMENSION, f"{names} of [{dims_text(dims)}] are both on {axis}")
        return found

    def check(self, what: str, dims: Dims, shape: Sequence[int] | None = None) -> None:
        """Raise InvalidArgument unless a tensor can be laid out so; `what` names it in the message."""
        try:
            divided = self.divided(dims)
        except InvalidArgument as exc:
            raise InvalidArgument(f"{exc} ({what})") from None
        if shape is None:
            return
        if len(shape) != len(dims):
            raise InvalidArgument(
                f"layout: {what} has {len(shape)} dimensions, {list(shape)}, and {len(dims)} names, "
                f"[{dims_text(dims)}]"
            )
        for axis, index in divided.items():
            if shape[index] % self.lengths[axis]:
                raise self.broken(
                    Rule.EVEN,
                    f"{dims[index]} of {what} has size {shape[index]}, {axis} length {self.lengths[axis]}",
                )

    def check_known(self, names: Iterable[str]) -> None:
        """Raise InvalidArgument where a rule names none of the dimensions `names`."""
        known = sorted(names)
        for dim, axis in self.rules:
            if dim not in known:
                raise self.broken(Rule.KNOWN_DIMENSION, f"{dim}:{axis}, but there are {', '.join(known)}")

    def check_ranks(self, num_ranks: int) -> None:
        """Raise InvalidArgument unless the mesh is one of `num_ranks` places."""
        if self.num_ranks != num_ranks:
            raise self.broken(Rule.ALL_RANKS, f"it has {self.num_ranks}, the job {num_ranks}")

    def part_of(self, dims: Dims) -> int:
        """Return in how many parts a tensor with these dimensions is divided."""
        return prod(self.lengths[axis] for axis in self.divided(dims))

    def broken(self, rule: Rule, what: str) -> InvalidArgument:
        """Return the error that says which rule this layout breaks, and by what."""
        return InvalidArgument(f"layout {self}: {what}; the rule: {rule.value}")


def dims_text(dims: Dims) -> str:
    """Return the names as messages show them."""
    return ", ".join("-" if dim is None else dim for dim in dims)


def parse_rules(rules: str | Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return (dimension, axis) pairs of text such as `batch:dp; hidden:tp`, or of a mapping."""
    return tuple(_pairs("rules", rules))


def parse_mesh(mesh: str | Mapping[str, int]) -> tuple[tuple[str, int], ...]:
    """Return (axis, length) pairs of text such as `dp:2, tp:2`, or of a mapping."""
    pairs: list[tuple[str, int]] = []
    for axis, length in _pairs("mesh", mesh):
        if isinstance(length, str) and not length.isdecimal():
            raise InvalidArgument(f"layout: mesh={shown(mesh)}: the length of {axis} is {length!r}")
        pairs.append((axis, int(length) if isinstance(length, str) else length))
    return tuple(pairs)


def _pairs(what: str, given: Any) -> list[tuple[str, Any]]:
    """Return the pairs of `name:value` items, separated by semicolons or commas, or of a mapping."""
    if isinstance(given, Mapping):
        return list(given.items())
    if not isinstance(given, str):
        raise InvalidArgument(f"layout: {what}={shown(given)}; expected text such as 'batch:dp; hidden:tp'")
    pairs = []
    for item in filter(None, map(str.strip, re.split("[;,]", given))):
        name, colon, value = (part.strip() for part in item.partition(":"))
        if not (colon and NAME.fullmatch(name) and value):
            raise InvalidArgument(f"layout: {what}={given!r}: {item!r} is not of the form name:value")
        pairs.append((name, value))
    return pairs
