"""What papers are written with: vectors by name, the world that a step sees, and sums over ranks.

A `paper.py` is an algorithm as it was published, with all ranks in one process: it imports torch and this
module alone (and `compression_kit`, if it compresses), and is pure: what it keeps goes in and comes out.
`verification.paper_run` trains by it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from mpisgd.method_state import BEGIN, COPY, OWNER, ZEROS, alike, own, part

__all__ = [
    "Draws",
    "Event",
    "Paper",
    "Slice",
    "Vec",
    "Vecs",
    "World",
    "alike",
    "anew",
    "evenly",
    "everyone",
    "filled",
    "host_means",
    "mean",
    "own",
    "part",
    "sent",
    "total",
    "weighted",
]

S = TypeVar("S")


class Vec(dict[str, Tensor]):
    """A vector of one rank: tensors by the names of parameters.

    An absent name is a parameter that is frozen, unused or not added yet; in sums it is zero.
    """

    def each(self, function: Callable[[Tensor], Tensor]) -> "Vec":
        """Return the function of each tensor."""
        return Vec({name: function(tensor) for name, tensor in self.items()})

    def only(self, names: Iterable[str]) -> "Vec":
        """Return its tensors of these names."""
        return Vec({name: self[name] for name in names if name in self})

    def nonzero(self) -> "Vec":
        """Return 1 where it is not 0, else 0."""
        return self.each(lambda tensor: (tensor != 0).to(tensor.dtype))

    def without(self, names: Iterable[str]) -> "Vec":
        """Return its tensors of other names."""
        return Vec({name: tensor for name, tensor in self.items() if name not in names})

    def __or__(self, other: "Vec") -> "Vec":  # type: ignore[override]
        """Return the tensors of both; of a name that both have, the other's."""
        return Vec({**self, **other})

    def __add__(self, other: "Vec") -> "Vec":
        both = {name: self[name] + other[name] for name in self if name in other}
        return Vec({**self, **other, **both})

    def __sub__(self, other: "Vec") -> "Vec":
        return self + other.each(torch.neg)

    def __mul__(self, other: "float | Vec") -> "Vec":
        """Multiply by a number, or element by element."""
        if isinstance(other, Vec):
            return Vec({name: self[name] * other[name] for name in self})
        return self.each(lambda tensor: tensor * other)

    __rmul__ = __mul__

    def __truediv__(self, other: "float | Vec") -> "Vec":
        """Divide by a number, or element by element."""
        if isinstance(other, Vec):
            return Vec({name: self[name] / other[name] for name in self})
        return self.each(lambda tensor: tensor / other)


Vecs = dict[int, Vec]  # by rank


class Slice(NamedTuple):
    """Elements `begin` to `end` of a parameter, which is flat."""

    name: str
    begin: int
    end: int

    def of(self, v: Vec) -> Tensor:
        """Return them."""
        return v[self.name].flatten()[self.begin : self.end]

    @property
    def numel(self) -> int:
        """How many they are."""
        return self.end - self.begin


class Draws(Protocol):
    """Random numbers of one moment, of one rank or of all alike."""

    def uniform(self, name: str, like: Tensor) -> Tensor:
        """Return numbers in [0, 1) for the elements of a parameter, of the shape of `like`."""

    def normal(self, name: str, like: Tensor, columns: int) -> Tensor:
        """Return normal numbers for a parameter [n, m]: [m, columns]."""

    def choice(self, numel: int, count: int) -> Tensor:
        """Return `count` different ones of the first `numel` whole numbers."""


class World(NamedTuple):
    """What a step sees beside the method's own state.

    Attributes:
        ranks: who is there.
        hosts: the same, by host.
        step: its number, from 1.
        weight: how many examples a rank has in this step, 1 each if all have equally many; 0: none are left.
        layout: the buckets that all ranks have agreed on, of what travels together.
        lay_out: returns those of other parameters that travel together.
        sum: of a tensor of some ranks, in float32 at least; the order of the additions is the caller's.
        random: see `draw`; of these buckets.
        optimizer: x of a rank after a step of the wrapped optimizer with g, as `optimizer(rank, x, g)`.
        average_state: lets what the wrapped optimizers of some ranks keep of each element become its mean,
            given what each rank counts; of a parameter that a rank has not stepped with yet it keeps zeros.
        wire: the compressor's paper, by which a mean travels; without compression it is exact.
    """

    ranks: tuple[int, ...]
    hosts: tuple[tuple[int, ...], ...]
    step: int
    weight: Mapping[int, float]
    layout: tuple[tuple[Slice, ...], ...]
    lay_out: Callable[[Iterable[str]], tuple[tuple[Slice, ...], ...]]
    sum: Callable[[Mapping[int, Tensor]], Tensor]
    random: Callable[[tuple[tuple[Slice, ...], ...], int, int | None], Draws]
    optimizer: Callable[[int, Vec, Vec], Vec]
    average_state: Callable[[Mapping[int, float]], None]
    wire: "Paper[Any]"

    def draw(self, k: int, place: int | None) -> Draws:
        """Return random numbers of reduction k: of all ranks, or of one by its place among `ranks`."""
        return self.random(self.layout, k, place)

    def only(self, names: Iterable[str]) -> "World":
        """Return the world in which these parameters travel by themselves."""
        return self._replace(layout=self.lay_out(names))


class Event(NamedTuple):
    """Something that happened to some ranks while nobody waited, as it was recorded.

    Attributes:
        what: its name in the paper.
        ranks: to whom.
        g: the gradient that came with it.
        names: of which parameters it is; (): of all.
    """

    what: str
    ranks: tuple[int, ...]
    g: Vec = Vec()
    names: tuple[str, ...] = ()


class Paper(Generic[S]):
    """An algorithm: what becomes of the gradients g and the parameters x of all ranks, by rank.

    A step is gradients, `reduce`, whatever the program does with the gradients (clipping, say), `update`,
    `after`. S is what is kept: None, or a frozen dataclass whose fields are marked `alike`, `own` (a dict by
    rank) or `part` (the S of the wire). Hyperparameters are fields of the subclass, by their symbols.

    Attributes:
        keeps: S, where its marks say what is kept before the first step: "copy", what the first rank has;
            "zeros", a vector without names, of each rank where it is its own. None: `start` does.
        consensus: the field of S that is the model which other ranks go on from; "": the mean of x.
        leaves_frozen: whether x lacks parameters that are frozen now; only the optimizer changes them then.
        weighs: whether it looks at `World.weight` itself; else it is given `weighted` gradients.
        depends_on: folders of other papers, to be read with this one.

    Of a compressor, what decides which programs can be compared with it, and how:

        of_buckets: whether what becomes of a parameter depends on where it lies in its bucket, as random
            numbers do, and chunks of ranks.
        of_memory: or on the order of its elements in memory; so do these.
        counts: whether it depends on how many reductions there were.
        rounds: whether exact numbers do not stay so, as they are multiplied or divided.
        chooses: whether it takes some of several equal elements.
    """

    keeps: ClassVar[type | None] = None
    consensus: ClassVar[str] = ""
    leaves_frozen: ClassVar[bool] = False
    weighs: ClassVar[bool] = False
    depends_on: ClassVar[tuple[str, ...]] = ()
    of_buckets: ClassVar[bool] = False
    of_memory: ClassVar[bool] = False
    counts: ClassVar[bool] = False
    rounds: ClassVar[bool] = True
    chooses: ClassVar[bool] = False

    def start(self, x: Vecs, w: World) -> S:
        """Return the state before the first step; by default as the marks of `keeps` say, or nothing."""
        if self.keeps is None:
            return None  # type: ignore[return-value]  # S is None
        begun: dict[str, Any] = {}
        for each in fields(self.keeps):
            owner, begin = each.metadata[OWNER], each.metadata[BEGIN]
            if owner == "part":
                begun[each.name] = w.wire.start(x, w)
            elif begin == COPY:
                begun[each.name] = x[w.ranks[0]]
            elif owner == "own" and begin == ZEROS:
                begun[each.name] = everyone(Vec(), w)
        kept: S = self.keeps(**begun)
        return kept

    def reduce(self, s: S, g: Vecs, w: World) -> tuple[S, Vecs]:
        """Return the gradients that the ranks take; by default each its own."""
        return s, g

    def update(self, s: S, x: Vecs, g: Vecs, w: World) -> tuple[S, Vecs]:
        """Return the parameters after the update; by default the wrapped optimizer's."""
        return s, {i: w.optimizer(i, x[i], g[i]) for i in w.ranks}

    def after(self, s: S, x: Vecs, w: World) -> tuple[S, Vecs]:
        """Return the parameters at the end of the step."""
        return s, x

    def event(self, s: S, x: Vecs, e: Event, w: World) -> tuple[S, Vecs]:
        """Return the parameters after an event, for methods in which nobody waits."""
        raise NotImplementedError


# --- over the ranks -----------------------------------------------------------------------------------


def filled(v: Vecs) -> Vecs:
    """Return vectors that have all names that some rank has: zero where a rank has none."""
    like = {name: tensor for one in v.values() for name, tensor in one.items()}
    zeros = Vec({name: torch.zeros_like(tensor) for name, tensor in like.items()})
    return {i: Vec({name: one.get(name, zeros[name]) for name in like}) for i, one in v.items()}


def total(v: Mapping[int, Vec], w: World) -> Vec:
    """Return the sum over the ranks that `v` has, which all have the same names; rounded once."""
    first = next(iter(v.values()))
    return Vec({name: w.sum({i: one[name] for i, one in v.items()}).to(first[name].dtype) for name in first})


def mean(v: Mapping[int, Vec], w: World) -> Vec:
    """Return the mean over the ranks that `v` has, which all have the same names; rounded once."""
    first = next(iter(v.values()))
    sums = {name: w.sum({i: one[name] for i, one in v.items()}) for name in first}
    return Vec({name: (each / len(v)).to(first[name].dtype) for name, each in sums.items()})


def weighted(v: Mapping[int, Vec], n: Mapping[int, float]) -> Vecs:
    """Return p n_i / (n_1 + ... + n_p) v_i, whose mean over the p ranks counts n_i examples of rank i."""
    share = {i: len(v) * n[i] / sum(n.values()) for i in v}
    return {i: v_i if share[i] == 1 else share[i] * v_i for i, v_i in v.items()}


def everyone(v: Vec, w: World) -> Vecs:
    """Return v for each rank."""
    return dict.fromkeys(w.ranks, v)


def host_means(v: Vecs, w: World) -> Vecs:
    """Return for each rank the mean over the ranks of its host."""
    means = {host: mean({i: v[i] for i in host}, w) for host in w.hosts}
    return {i: means[host] for host in w.hosts for i in host}


def sent(kept: Any, v: Vecs, w: World, n: Mapping[int, float] | None = None) -> tuple[Any, Vec]:
    """Return the state of the wire, and the mean that arrives; n: the number of examples of each rank."""
    kept, out = w.wire.reduce(kept, v if n is None else weighted(v, n), evenly(w))
    return kept, out[w.ranks[0]]


def anew(kept: Any, begun: Any) -> Any:
    """Return the state of a wire, in which the parts that are each rank's own begin anew."""
    own_names = [each.name for each in fields(kept) if each.metadata[OWNER] == "own"] if kept else []
    return replace(kept, **{name: getattr(begun, name) for name in own_names}) if own_names else kept


def evenly(w: World) -> World:
    """Return the world in which all ranks count alike."""
    return w._replace(weight=dict.fromkeys(w.ranks, 1))
