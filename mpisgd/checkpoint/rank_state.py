"""What differs by rank of an optimizer's state: gathered for the file, and given back to each rank.

The file has the state of the first rank, as one that all ranks have alike, and beside it, under names of
their own, what belongs to each rank:

    state: {"model": ..., "optimizer": ..., "optimizer (rank 0)": ..., "optimizer (rank 1)": ...}

The latter are what `mpisgd.optim.own_state` takes out. As many ranks get back what each of them had. Any
other number goes on from the consensus of the ranks' models.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpisgd.checkpoint.at_root import ROOT, gather_at_root
from mpisgd.checkpoint.header import Document
from mpisgd.checkpoint.serialization import Encoded, decode, encode, tensor_names
from mpisgd.collectives.objects import Allocate, allocate_tensors, extract_tensors, scatter_object
from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.method_state import ENTRY, HasOwnState, mean_of
from mpisgd.optim.own_state import copy_into_replica, merge_own

__all__ = [
    "KIND",
    "OfRanks",
    "Returned",
    "WithRanks",
    "alike_tensors",
    "encode_all",
    "gather_own",
    "give_back",
    "load_replicas",
    "shares",
    "take_out",
]

KIND = "rank"  # of an entry of the document
TAG = 30_002  # unlikely in a program's own messages
_NAME = re.compile(r"(.*) \(rank (\d+)\)", re.DOTALL)


def _name_of(name: str, rank: int) -> str:
    return f"{name} (rank {rank})"


# --- saving -------------------------------------------------------------------------------------------


def encode_all(common: Mapping[str, Any], own: Mapping[str, Any], rank: int) -> tuple[Encoded, Encoded]:
    """Encode what this rank saves: what is common to all ranks, and what is its own.

    On the root both are encoded together, so that a tensor of the model that is in its replica, too, is in
    the file once.
    """
    named = {_name_of(name, rank): state for name, state in own.items()}
    if rank != ROOT:
        return encode(common), encode(named)
    both = encode({**common, **named})
    trees = {name: both.tree.pop(name) for name in named}
    return both, Encoded(trees, both.tensors, [])


def alike_tensors(encoded: Encoded, optimizers: Collection[str]) -> dict[str, Tensor]:
    """Return the tensors of the common part, of which all ranks have the same ones.

    Args:
        encoded: what is saved.
        optimizers: names of those of whose state that is not so.
    """
    names = {name for tree in encoded.tree.values() for name in tensor_names(tree)}
    apart = tuple(f"{name}.state." for name in optimizers)
    return {n: t for n, t in encoded.tensors.items() if n in names and not n.startswith(apart)}


class _Outline(NamedTuple):
    """What a rank tells the root of what is its own: trees by name, and of which form the tensors are."""

    trees: dict[str, Any]
    forms: dict[str, tuple[torch.dtype, torch.Size]]


def gather_own(group: Group, mine: Encoded) -> Encoded | None:
    """Gather the entries that are each rank's own on the root; None elsewhere. Collective.

    Args:
        group: the ranks.
        mine: this rank's, as `encode_all` has returned it.
    """
    tensors = {} if group.rank == ROOT else mine.tensors
    forms = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    outlines = gather_at_root(
        group, Operation("checkpoint.save", root=ROOT, extra="own"), _Outline(mine.tree, forms)
    )
    if outlines is None:
        _send(group, ROOT, tensors.values())
        return None
    found = Encoded(dict(mine.tree), {}, [])
    for rank, theirs in enumerate(outlines):
        if rank != ROOT:
            found.tree.update(theirs.trees)
            found.tensors.update(_receive(group, rank, theirs.forms, torch.empty))
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


Trees = dict[str, dict[int, Any]]  # by object and rank


class OfRanks(NamedTuple):
    """What belongs to single ranks in a file.

    Attributes:
        trees: by object and rank.
        tensors: those in the trees.
    """

    trees: Trees
    tensors: Mapping[str, Tensor]


def take_out(document: Document) -> tuple[Document, Trees]:
    """Take what belongs to single ranks out of what stands beside the tensors."""
    state, kinds = dict(document.state), dict(document.kinds)
    trees: Trees = {}
    for name in [name for name, kind in kinds.items() if kind == KIND]:
        del kinds[name]
        tree = state.pop(name)
        if (parts := _NAME.fullmatch(name)) is not None:
            trees.setdefault(parts[1], {})[int(parts[2])] = tree
    return document._replace(state=state, kinds=kinds), trees


def shares(
    group: Group, found: OfRanks, num_saved: int, states: Mapping[str, Any], objects: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Return each rank's share of the entries of single ranks, by object. On the root; nothing elsewhere.

    Args:
        group: the ranks.
        found: what the file has of them.
        num_saved: how many ranks have saved it.
        states: of the objects, the same on all ranks.
        objects: what is loaded, by name.
    """
    parts: list[dict[str, Any]] = [{} for _ in range(group.size)]
    for name, of_ranks in found.trees.items():
        if name in objects:
            # A rank that had nothing of its own has saved nothing: with PerHost, say, which is not the first.
            of_all = [of_ranks.get(rank) for rank in range(num_saved)]
            saved = [{"own": {}} if tree is None else decode(tree, found.tensors) for tree in of_all]
            for part, mine in zip(
                parts, _shares(group.size, num_saved, saved, states[name], objects[name]), strict=True
            ):
                if mine is not None:
                    part[name] = mine
    return parts


class Returned(NamedTuple):
    """What comes back to a rank.

    Attributes:
        states: the states of the objects, with what is this rank's own in them.
        replicas: parameters and buffers for objects of which ranks have different ones, by key.
    """

    states: dict[str, Any]
    replicas: dict[str, dict[str, Tensor]]


def give_back(
    group: Group, parts: list[dict[str, Any]], states: Mapping[str, Any], empty: Allocate
) -> Returned:
    """Return on each rank what is its own. Collective.

    Args:
        group: the ranks.
        parts: what `shares` has returned.
        states: of the objects, the same on all ranks.
        empty: makes memory for tensors.
    """
    mine = _scatter(group, parts, empty)
    rank, size = group.rank, group.size
    merged = {name: merge_own(state, mine.get(name), rank, size) for name, state in states.items()}
    return Returned(merged, {name: part["replica"] for name, part in mine.items() if "replica" in part})


def _shares(
    size: int, num_saved: int, saved: list[dict[str, Any]], state: Mapping[str, Any], value: Any
) -> Sequence[dict[str, Any] | None]:
    """Return the share of each of `size` ranks in the saved entries of an object."""
    if not isinstance(value, HasOwnState):
        return [None] * size
    entry = state[ENTRY]
    if size == num_saved and entry["of"] == value.method:
        return saved
    replicas = [mine["replica"] for mine in saved if "replica" in mine]
    if not replicas:
        return [None] * size
    if entry["of"] != value.method:
        return [{"replica": mean_of(replicas)}] * size
    entries = [{**entry, "own": mine["own"]} for mine in saved]
    return [{"replica": value.consensus_of(replicas, entries)}] * size


def load_replicas(objects: Mapping[str, Any], replicas: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Put replicas into the parameters of models that are loaded, too; others are not to be changed."""
    modules = [value for value in objects.values() if isinstance(value, nn.Module)]
    loaded = {tensor.data_ptr() for module in modules for tensor in (*module.parameters(), *module.buffers())}
    for name, replica in replicas.items():
        copy_into_replica(objects[name], replica, loaded)


# --- messages -----------------------------------------------------------------------------------------


def _scatter(group: Group, parts: Sequence[Any], empty: Allocate) -> Any:
    """Return `parts[rank]` of the root on each rank. Collective."""
    outlined = [extract_tensors(part) for part in parts] if group.rank == ROOT else []
    outlines = [outline for outline, _ in outlined] if outlined else None
    outline = scatter_object(outlines, group.ranks[ROOT], group)
    if group.rank == ROOT:
        for rank, (_, tensors) in enumerate(outlined):
            if rank != ROOT:
                _send(group, rank, tensors)
        return parts[ROOT]
    mine, tensors = allocate_tensors(outline, empty)
    _receive_into(group, ROOT, tensors)
    return mine


def _send(group: Group, rank: int, tensors: Collection[Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel():
            isend(_bytes_of(tensor), group.ranks[rank], group, TAG).wait()


def _receive(
    group: Group,
    rank: int,
    forms: Mapping[str, tuple[torch.dtype, torch.Size]],
    empty: Callable[..., Tensor],
) -> dict[str, Tensor]:
    made = {name: empty(tuple(shape), dtype=dtype) for name, (dtype, shape) in forms.items()}
    _receive_into(group, rank, made.values())
    return made


def _receive_into(group: Group, rank: int, tensors: Collection[Tensor]) -> None:
    for tensor in tensors:
        if tensor.numel():
            irecv(tensor.reshape(-1).view(torch.uint8), group.ranks[rank], group, TAG).wait()


def _bytes_of(tensor: Tensor) -> Tensor:
    plain = tensor.resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8)
