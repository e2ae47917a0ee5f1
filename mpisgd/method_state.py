"""What a method keeps from step to step: each piece is declared once, and one mechanism does the rest.

A strategy, a compressor or an optimizer that communicates has its state in a dataclass, whose fields say
whose they are:

    alike      the same on all ranks: one rank's copy stands for all, and ranks compare it after a load
    own        this rank's alone: saved by each rank, and given back to the same rank of as many ranks
    part       an object that is divided in the same way itself; see `Part`

What is not in it is derived: made again from parameters, ranks and state. A field of type `dict[str, ...]`
has an entry for each parameter, by its key (see `Synchronizer.tensors`), so parameters that are added get
entries of their own and change no others. Nobody writes code to save or to load.

In a `state_dict` it is the entry "mpisgd":

    {"version": 1, "of": METHOD, "compression": COMPRESSOR, "rank": 0, "size": 4, "steps": 17,
     "begun": [KEY, ...], "alike": {FIELD: ...}, "own": {FIELD: ...}}
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from mpisgd.errors import InvalidArgument

__all__ = [
    "COPY",
    "ENTRY",
    "REBUILD",
    "VERSION",
    "ZEROS",
    "HasOwnState",
    "Part",
    "Pieces",
    "alike",
    "begins_of",
    "begun",
    "check_version",
    "copied",
    "entry_of",
    "forget_own",
    "has_rebuilt",
    "mean_of",
    "names_of",
    "own",
    "own_of",
    "part",
    "parts_of",
    "pieces_of",
    "restart",
    "take",
    "without_parts",
]

ENTRY = "mpisgd"  # of a state_dict
VERSION = 1  # of that entry; a reader refuses any other one

OWNER, LOST, BEGIN = "owner", "lost", "begin"  # keys of a field's metadata
DROP, REBUILD = "drop", "rebuild"
COPY, ZEROS = "copy", "zeros"
PLAIN = (bool, int, float, str, dict)  # a dict is empty before the first step

T = TypeVar("T")


class Pieces(NamedTuple):
    """A state, by whose it is.

    Attributes:
        alike: what all ranks have alike, by field.
        own: what is this rank's, by field.
    """

    alike: dict[str, Any]
    own: dict[str, Any]


@runtime_checkable
class Part(Protocol):
    """An object whose state is divided, too: a field of the dataclass that has it."""

    def pieces(self) -> Pieces:
        """Return its state; not copied."""

    def take(self, alike: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Begin anew, and take over copies of what is given; `own` None: it is lost."""

    def forget_own(self) -> None:
        """Begin anew with what is this rank's."""


@runtime_checkable
class HasOwnState(Protocol):
    """An optimizer with the entry "mpisgd" in its `state_dict`, and maybe parameters that differ by rank."""

    @property
    def method(self) -> str:
        """What its entry is "of"."""

    def method_entry(self) -> dict[str, Any]:
        """Return the entry by its name, as `state_dict` has it; {} where there is none. Not collective."""

    def replica(self, *, anyway: bool = False) -> dict[str, Tensor]:
        """Return the tensors of the model that differ by rank, by key; not copied. {}: all ranks have one.

        Args:
            anyway: also where they do not differ: those that would.
        """

    def consensus_of(
        self, replicas: Sequence[Mapping[str, Tensor]], entries: Sequence[Any]
    ) -> dict[str, Tensor]:
        """Return the consensus of the replicas of all ranks, with their entries of `state_dict`."""

    def forget_own_state(self) -> None:
        """Begin anew with what is this rank's own, as all ranks do."""


# --- the declaration ----------------------------------------------------------------------------------


def alike(default: Any = MISSING, *, default_factory: Any = MISSING, begin: str = "") -> Any:
    """Declare a field that is the same on all ranks.

    Args:
        default: what it is before the first step.
        default_factory: makes that, as for `dataclasses.field`; `dict` for an entry for each parameter.
        begin: what the entry of a parameter begins as. "copy": what the first rank has of it; "zeros". "":
            that is for the method to say, see `Synchronizer.begin`.
    """
    assert begin in ("", COPY, ZEROS), f"begin={begin!r}"
    return _field("alike", default, default_factory, begin=begin)


def own(default: Any = MISSING, *, default_factory: Any = MISSING, lost: str = DROP, begin: str = "") -> Any:
    """Declare a field that is this rank's alone.

    Args:
        default: what it is before the first step.
        default_factory: makes that, as for `dataclasses.field`; `dict` for an entry for each parameter.
        lost: what becomes of it where a rank has none of its own back, as one that another rank has saved, or
            another number of ranks. "drop": that rank begins anew. "rebuild": all ranks do, together, since
            what one of them has says something of the others.
        begin: what the entry of a parameter begins as: "zeros", or "", see `alike`.
    """
    assert lost in (DROP, REBUILD), f"lost={lost!r}"
    assert begin in ("", ZEROS), f"begin={begin!r}"
    return _field("own", default, default_factory, lost, begin)


def part(default_factory: Any) -> Any:
    """Declare a field that is a `Part`, made by `default_factory`."""
    return _field("part", MISSING, default_factory)


def _field(owner: str, default: Any, default_factory: Any, lost: str = DROP, begin: str = "") -> Any:
    given: dict[str, Any] = {"metadata": {OWNER: owner, LOST: lost, BEGIN: begin}}
    if default is not MISSING:
        return field(default=default, **given)
    return field(default_factory=default_factory, **given)


def _declared(state: Any) -> Iterable[tuple[Field[Any], str]]:
    """Yield the fields of a state, with whose they are.

    Raises:
        InvalidArgument: a field is not marked.
    """
    for each in fields(state):
        owner = each.metadata.get(OWNER)
        if owner is None:
            raise InvalidArgument(
                f"{type(state).__name__}.{each.name} does not say whose it is; declare it as alike(...), "
                "own(...) or part(...) of mpisgd.method_state"
            )
        yield each, owner


def names_of(state: Any) -> set[str]:
    """Return the names of the fields of a state."""
    return {each.name for each, _ in _declared(state)} if state is not None else set()


def begins_of(state: Any) -> dict[str, str]:
    """Return the first value of entries of parameters, by field, where that is declared.

    Args:
        state: a dataclass, or an object of one.
    """
    declared = _declared(state) if state is not None else ()
    return {each.name: each.metadata[BEGIN] for each, _ in declared if each.metadata[BEGIN]}


def has_rebuilt(state: Any) -> bool:
    """Return whether something in a state is to be rebuilt by all ranks where one has lost its own."""
    return state is not None and any(each.metadata[LOST] == REBUILD for each, _ in _declared(state))


# --- the mechanism ------------------------------------------------------------------------------------


def pieces_of(state: Any) -> Pieces:
    """Return the fields of a state; not copied. None has none."""
    pieces = Pieces({}, {})
    for each, owner in _declared(state) if state is not None else ():
        value = getattr(state, each.name)
        if owner != "part":
            (pieces.alike if owner == "alike" else pieces.own)[each.name] = _plain(value)
            continue
        inner = value.pieces()
        if inner.alike:
            pieces.alike[each.name] = inner.alike
        if inner.own:
            pieces.own[each.name] = inner.own
    return pieces


def begun(state: Any) -> dict[str, Any]:
    """Return the fields of a state without parts that are not as before the first step; not copied."""
    found = {}
    for each, _ in _declared(state) if state is not None else ():
        value, first = getattr(state, each.name), _first(each)
        if value is not first and not (isinstance(value, PLAIN) and value == first):
            found[each.name] = value
    return found


def without_parts(state: Any, pieces: Pieces, kind: type) -> Pieces:
    """Return pieces without those of the parts of a state that are of a class."""
    parts: Mapping[str, Any] = _parts(state, kind)
    return Pieces(*({name: v for name, v in of_one.items() if name not in parts} for of_one in pieces))


def parts_of(state: Any, kind: type[T]) -> Iterable[T]:
    """Return the parts of a state that are of a class."""
    return _parts(state, kind).values()


def _parts(state: Any, kind: type[T]) -> dict[str, T]:
    declared = _declared(state) if state is not None else ()
    parts = {each.name: getattr(state, each.name) for each, owner in declared if owner == "part"}
    return {name: value for name, value in parts.items() if isinstance(value, kind)}


def take(
    state: Any, alike: Mapping[str, Any], own: Mapping[str, Any] | None, like: Mapping[str, Tensor]
) -> None:
    """Take over copies of what `pieces_of` has returned; what is not there begins anew.

    Args:
        state: changed.
        alike: of any rank.
        own: of this rank; None: it is lost.
        like: the parameters, by key; an entry of such a shape goes to its parameter's device.
    """
    restart(state)
    for each, owner in _declared(state) if state is not None else ():
        if owner == "part":
            mine = None if own is None else own.get(each.name, {})
            getattr(state, each.name).take(alike.get(each.name, {}), mine)
            continue
        found = alike if owner == "alike" else own or {}
        if each.name in found:
            value, first = _placed(found[each.name], like), getattr(state, each.name)
            setattr(state, each.name, type(first)(value) if isinstance(first, dict) else value)


def restart(state: Any) -> None:
    """Begin anew, as before the first step."""
    for each, owner in _declared(state) if state is not None else ():
        if owner == "part":
            getattr(state, each.name).take({}, None)
        else:
            setattr(state, each.name, _first(each))


def forget_own(state: Any, *, only: str | None = None) -> None:
    """Begin anew with what is this rank's.

    Args:
        state: changed.
        only: do so with fields of this rule alone; None: with all.
    """
    for each, owner in _declared(state) if state is not None else ():
        if only is not None and each.metadata[LOST] != only:
            continue
        if owner == "part":
            getattr(state, each.name).forget_own()
        elif owner == "own":
            setattr(state, each.name, _first(each))


def _first(each: Field[Any]) -> Any:
    if each.default is not MISSING:
        return each.default
    assert each.default_factory is not MISSING
    return each.default_factory()


def _plain(value: Any) -> Any:
    """Return the form in which a value is saved: a plain dict of a method's own kind of dict."""
    return dict(value) if isinstance(value, dict) and type(value) is not dict else value


def _placed(value: Any, like: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, Mapping):
        return copied(value)
    return {key: copied(entry, like.get(key)) for key, entry in value.items()}


def copied(value: Any, like: Tensor | None = None) -> Any:
    """Return a copy of dicts, lists and tuples of tensors; a tensor of the shape of `like` where that is."""
    if isinstance(value, Tensor):
        moves = like is not None and value.shape == like.shape
        return value.detach().to(like.device if moves and like is not None else value.device, copy=True)
    if isinstance(value, Mapping):
        return {key: copied(entry, like) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(copied(entry, like) for entry in value)
    return value


def mean_of(replicas: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the mean of tensors of the same keys."""
    return {key: torch.stack([replica[key] for replica in replicas]).mean(0) for key in replicas[0]}


def entry_of(
    pieces: Pieces,
    *,
    of: str,
    rank: int,
    size: int,
    steps: int,
    compression: str = "",
    begun: Iterable[str] = (),
    has_own: bool = True,
) -> dict[str, Any]:
    """Return a method's part of a state_dict; see above.

    Args:
        pieces: of its state.
        of: its name.
        rank: whose it is.
        size: how many ranks there are.
        steps: how many there were.
        compression: what the compressor keeps its state as.
        begun: keys of the tensors that have entries.
        has_own: whether what is the rank's own is there.
    """
    entry = {
        "version": VERSION,
        "of": of,
        "compression": compression,
        "rank": rank,
        "size": size,
        "steps": steps,
        "begun": sorted(begun),
        "alike": pieces.alike,
        "own": pieces.own if has_own else None,
    }
    return {ENTRY: entry}


def own_of(entry: Mapping[str, Any], rank: int, size: int) -> dict[str, Any] | None:
    """Return a rank's own part of an entry; None: it is another one's, or of another number of ranks."""
    mine: dict[str, Any] | None = entry["own"] if (entry["rank"], entry["size"]) == (rank, size) else None
    return mine


def check_version(entry: Mapping[str, Any]) -> None:
    """Raise where an entry was written by a version of which the form is not known.

    Raises:
        InvalidArgument: says which one.
    """
    if entry.get("version") != VERSION:
        raise InvalidArgument(
            f'load_state_dict: the entry "{ENTRY}" of this state has version {entry.get("version")!r}, and '
            f"this mpisgd reads version {VERSION}; load it with the mpisgd that wrote it, or a newer one"
        )
