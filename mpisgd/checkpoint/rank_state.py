"""What differs by rank of an optimizer's state: gathered for the file, and given back to each rank.

The file has the state of the first rank, as one that all ranks have alike, and beside it, under names of
their own, what belongs to each rank:

    state: {"model": ..., "optimizer": ..., "optimizer (rank 0)": ..., "optimizer (rank 1)": ...}

The latter are dicts of "own", of the method's entry (see `mpisgd.method_state`), and, where the models of the
ranks differ, of "state", that of the wrapped optimizer, and of "replica", the parameters and buffers. As many
ranks get back what each of them had. Any other number goes on from what the replicas stand for together.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpisgd.checkpoint.serialization import Encoded, decode, encode, tensor_names
from mpisgd.collectives.objects import Allocate, scatter_object
from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.method_state import ENTRY, HasOwnState, mean_of

__all__ = [
    "KIND",
    "Returned",
    "WithRanks",
    "gather_at_root",
    "give_back",
    "load_replicas",
    "own_tensors",
    "split",
    "take_out",
]

KIND = "rank"  # of an entry of the document
ROOT = 0
TAG = 30_002  # unlikely in a program's own messages
_NAME = re.compile(r"(.*) \(rank (\d+)\)", re.DOTALL)


def _name_of(name: str, rank: int) -> str:
    return f"{name} (rank {rank})"


# --- saving -------------------------------------------------------------------------------------------


def split(value: Any, state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return what is saved of an object's state for all ranks, and what for this one; None: nothing."""
    if not isinstance(value, HasOwnState) or ENTRY not in state:
        return state, None
    entry, replica = state[ENTRY], value.replica()
    mine: dict[str, Any] = {"own": entry["own"]}
    if replica:
        mine |= {"state": state["state"], "replica": replica}
    common = {**state, ENTRY: {**entry, "own": None}}
    return common, mine if replica or entry["own"] else None


def own_tensors(name: str, mine: Mapping[str, Any]) -> str | None:
    """Return how the tensors of the common state begin that may differ in number and shape by rank."""
    return f"{name}.state." if "state" in mine else None


class _Outline(NamedTuple):
    """What a rank tells the root of what is its own: trees by name, and of which form the tensors are."""

    trees: dict[str, Any]
    forms: dict[str, tuple[torch.dtype, torch.Size]]


def gather_at_root(group: Group, mine: Mapping[str, Any]) -> Encoded | None:
    """Return what is every other rank's own on the root, None elsewhere. Collective.

    Args:
        group: the ranks.
        mine: this rank's, by the name of the object; the root's is not sent.
    """
    encoded = encode({_name_of(name, group.rank): state for name, state in mine.items()})
    tensors = {} if group.rank == ROOT else encoded.tensors
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    outlines: list[list[_Outline] | None] = []
    outline = _Outline(encoded.tree, forms)
    group.queue.run(
        Operation("checkpoint.save", root=ROOT, extra="what is each rank's own"),
        lambda: outlines.append(group.queue.communicator.gather_object(outline, ROOT)),
    )
    if group.rank != ROOT:
        _send(group, ROOT, tensors.values())
        return None
    assert outlines[0] is not None
    found = Encoded({}, {}, [])
    for rank, theirs in enumerate(outlines[0]):
        if rank != ROOT:
            found.tree.update(theirs.trees)
            found.tensors.update(_receive(group, rank, theirs.forms, _in_memory))
    return found


# --- loading ------------------------------------------------------------------------------------------


class WithRanks(Collection[str]):
    """Names of objects, and those of what belongs to each rank of them.

    Args:
        names: of the objects.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def __contains__(self, name: object) -> bool:
        """Return whether it is one of them, or of one of their ranks."""
        if name in self._names:
            return True
        found = _NAME.fullmatch(name) if isinstance(name, str) else None
        return found is not None and found[1] in self._names

    def __iter__(self) -> Iterator[str]:
        """Yield the names of the objects."""
        return iter(self._names)

    def __len__(self) -> int:
        """Return how many objects there are."""
        return len(self._names)


def take_out(
    state: dict[str, Any], kinds: dict[str, str], tensors: dict[str, Tensor]
) -> tuple[dict[str, dict[int, Any]], dict[str, Tensor]]:
    """Take what belongs to single ranks out of a document; return it as trees by object and rank.

    Args:
        state: of the document, as for `kinds`; without these entries then.
        tensors: those in the file that are wanted.

    Returns:
        The trees, and the tensors in them.
    """
    trees: dict[str, dict[int, Any]] = {}
    for name in [name for name, kind in kinds.items() if kind == KIND]:
        del kinds[name]
        tree = state.pop(name)
        if (found := _NAME.fullmatch(name)) is not None:
            trees.setdefault(found[1], {})[int(found[2])] = tree
    names = {name for ranks in trees.values() for tree in ranks.values() for name in tensor_names(tree)}
    return trees, {name: tensors[name] for name in names if name in tensors}


class Returned(NamedTuple):
    """What comes back to a rank.

    Attributes:
        states: the states of the objects, with what is this rank's own in them.
        replicas: parameters and buffers for objects of which ranks have different ones, by key.
    """

    states: dict[str, Any]
    replicas: dict[str, dict[str, Tensor]]


def give_back(
    group: Group,
    saved: tuple[dict[str, dict[int, Any]], dict[str, Tensor]] | None,
    num_saved: int,
    states: Mapping[str, Any],
    objects: Mapping[str, Any],
    empty: Allocate,
) -> Returned:
    """Return on each rank what is its own. Collective.

    Args:
        group: the ranks.
        saved: what `take_out` has returned, on the root.
        num_saved: how many ranks have saved it.
        states: of the objects, the same on all ranks.
        objects: what is loaded, by name.
        empty: makes memory for tensors.
    """
    parts: list[dict[str, Any]] = [{} for _ in range(group.size)]
    if saved is not None:
        trees, tensors = saved
        for name, of_ranks in trees.items():
            if name not in objects:
                continue
            decoded = [decode(tree, tensors) for _, tree in sorted(of_ranks.items())]
            for rank, mine in enumerate(_shares(group.size, num_saved, decoded, states[name], objects[name])):
                if mine is not None:
                    parts[rank][name] = mine
    mine = _scatter(group, parts, empty)
    merged = {name: _merged(group, state, mine.get(name)) for name, state in states.items()}
    return Returned(merged, {name: part["replica"] for name, part in mine.items() if "replica" in part})


def _shares(
    size: int, num_saved: int, saved: list[dict[str, Any]], state: Mapping[str, Any], value: Any
) -> Sequence[dict[str, Any] | None]:
    """Return what each of `size` ranks gets of what was saved of an object."""
    if not isinstance(value, HasOwnState):
        return [None] * size
    entry = state[ENTRY]
    if size == num_saved == len(saved) and entry["of"] == value.method:
        return saved
    replicas = [mine["replica"] for mine in saved if "replica" in mine]
    if not replicas:
        return [None] * size
    if entry["of"] != value.method:
        return [{"replica": mean_of(replicas)}] * size
    entries = [{**entry, "own": mine["own"]} for mine in saved]
    return [{"replica": value.consensus_of(replicas, entries)}] * size


def _merged(group: Group, state: Any, mine: Mapping[str, Any] | None) -> Any:
    """Return the state of an object as this rank has saved it."""
    if mine is None or "own" not in mine:
        return state
    entry = {**state[ENTRY], "own": mine["own"], "rank": group.rank, "size": group.size}
    return {**state, "state": mine.get("state", state["state"]), ENTRY: entry}


@torch.no_grad()
def load_replicas(objects: Mapping[str, Any], replicas: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Put replicas into the parameters of models that are loaded, too; others are not to be changed."""
    modules = [value for value in objects.values() if isinstance(value, nn.Module)]
    loaded = {tensor.data_ptr() for module in modules for tensor in (*module.parameters(), *module.buffers())}
    for name, replica in replicas.items():
        tensors = objects[name].replica(anyway=True)
        for key, value in replica.items():
            if key in tensors and tensors[key].data_ptr() in loaded:
                tensors[key].copy_(value)


# --- messages -----------------------------------------------------------------------------------------


def _scatter(group: Group, parts: list[dict[str, Any]], empty: Allocate) -> dict[str, Any]:
    """Return `parts[rank]` of the root on each rank. Collective."""
    encoded = [encode(part) for part in parts] if group.rank == ROOT else []
    outlines = [
        _Outline(each.tree, {name: (tensor.dtype, tensor.shape) for name, tensor in each.tensors.items()})
        for each in encoded
    ]
    outline = scatter_object(outlines if group.rank == ROOT else None, group.ranks[ROOT], group)
    if group.rank == ROOT:
        for rank, each in enumerate(encoded):
            if rank != ROOT:
                _send(group, rank, each.tensors.values())
        return parts[ROOT]
    tensors = _receive(group, ROOT, outline.forms, empty)
    return {name: decode(tree, tensors) for name, tree in outline.trees.items()}


def _send(group: Group, rank: int, tensors: Collection[Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel():
            isend(_bytes_of(tensor), group.ranks[rank], group, TAG).wait()


def _receive(
    group: Group, rank: int, forms: Mapping[str, tuple[torch.dtype, torch.Size]], empty: Allocate
) -> dict[str, Tensor]:
    made = {name: empty(shape, dtype) for name, (dtype, shape) in forms.items()}
    for tensor in made.values():
        if tensor.numel():
            irecv(tensor.reshape(-1).view(torch.uint8), group.ranks[rank], group, TAG).wait()
    return made


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)


def _in_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)
