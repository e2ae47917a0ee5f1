"""The first rank reads a checkpoint, and every rank gets what it needs of it.

    root    header | model ......... | exp_avg of 0 ........ | exp_avg of 1 ........ | is it intact? | model
            to all   is kept           parts to their owners   parts to their owners   to all          to all

What the ranks divide nobody has as a whole: each has its parts, and the root one tensor more. It travels
while the file is read, into memory that no object has seen yet. If the file proves to be damaged, that is
forgotten.
"""

import contextlib
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mpisgd.checkpoint import format, rank_state
from mpisgd.checkpoint.at_root import ROOT, at_root, gather_at_root
from mpisgd.checkpoint.newest import Candidates, Seen, candidates_at, newest_seen
from mpisgd.checkpoint.serialization import WRONG_TREE, decode, tensor_names
from mpisgd.checkpoint.storage import Location
from mpisgd.collectives.objects import Allocate
from mpisgd.collectives.point_to_point import irecv, isend
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CheckpointError
from mpisgd.optim.broadcast import broadcast_tensors
from mpisgd.sharding.needed_parts import LEAST_BYTES, LoadedPart, NeededPart
from mpisgd.sharding.offload.error_agreement import raised_on_every_rank

__all__ = ["Fetched", "Needs", "fetch"]

KIND = "checkpoint.load"
TAG = 30_003  # unlikely in a program's own messages

# What a rank needs of the tensors of objects, by the object's name and the tensor's key: of an optimizer the
# parameter's place, of a module the name in its `state_dict`. Of other objects all ranks need everything.
Needs = Mapping[str, Mapping[Any, NeededPart]]


class Fetched(NamedTuple):
    """A checkpoint, as a rank has it.

    Attributes:
        path: of the file.
        document: what stands beside the tensors, without what belongs to single ranks.
        tensors: by name; of those that are divided there is a `LoadedPart`.
        of_ranks: what belongs to single ranks, on the root.
        divided: names of the objects whose tensors are divided.
    """

    path: Location
    document: format.Document
    tensors: Mapping[str, Any]
    of_ranks: rank_state.OfRanks
    divided: frozenset[str]


class _Divided(NamedTuple):
    """A tensor of which each rank gets what it needs: whose it is, and its key among the object's needs."""

    entry: format.Entry
    name: str
    key: Hashable

    def needed(self, needs: Needs) -> NeededPart:
        """Return the part that a rank needs."""
        return needs[self.name][self.key]

    def buffer(self, needs: Needs, empty: Allocate) -> Tensor | LoadedPart:
        """Return memory for that."""
        return self.needed(needs).buffer(self.entry.shape, self.entry.dtype, empty)


class _Head(NamedTuple):
    """What all ranks are told of a checkpoint before its tensors are read.

    Attributes:
        path: of the file.
        document: what stands beside the tensors, without what belongs to single ranks.
        common: the tensors that all ranks get.
        divided: the others, in the order in which they come.
        names: of the objects that the ranks divide.
    """

    path: Location
    document: format.Document
    common: list[format.Entry]
    divided: list[_Divided]
    names: frozenset[str]


def fetch(group: Group, path: Location, objects: Mapping[str, Any], needs: Needs, empty: Allocate) -> Fetched:
    """Return a checkpoint, the same on every rank, with what this one needs of it. Collective.

    Args:
        group: the ranks.
        path: a file, or a folder, of which the newest intact one is taken.
        objects: what is loaded, by name.
        needs: of this rank. Objects that are not among those of all ranks, all ranks get as a whole.
        empty: makes the memory of tensors.

    Raises:
        CheckpointError, CheckpointDamaged: there is none, or the file cannot be read; on every rank.
    """
    seen = newest_seen(group, KIND, path)
    everyones = gather_at_root(group, Operation(KIND, root=ROOT, extra="needs"), needs)
    root = _Root(group, path, seen or [], objects, everyones or [])
    asked = Operation(KIND, root=ROOT, extra=", ".join(objects))
    is_intact = False
    with contextlib.closing(root):
        while not is_intact:
            head = at_root(group, asked, root.next_head)
            with raised_on_every_rank(group):
                common = {entry.name: empty(entry.shape, entry.dtype) for entry in head.common}
                buffers = {one.entry.name: one.buffer(needs, empty) for one in head.divided}
                root.make_room(empty)
            if group.rank == ROOT:
                root.read(common, buffers)
            else:
                _receive(group, head.divided, needs, buffers)
            is_intact = at_root(group, Operation(KIND, root=ROOT, extra="intact"), root.is_intact)
    broadcast_tensors([format.bytes_of(tensor) for tensor in common.values()], group.ranks[ROOT], group)
    return Fetched(head.path, head.document, {**common, **buffers}, root.of_ranks, head.names)


# --- on the root --------------------------------------------------------------------------------------


class _Root:
    """What the first rank does; the others have one that they do not use.

    Args:
        group: the ranks.
        path: a file or a folder.
        seen: the newest checkpoint that each host sees.
        objects: what is loaded, by name.
        everyones: the needs of all ranks.

    Attributes:
        of_ranks: what belongs to single ranks in the checkpoint that was read.
    """

    of_ranks = rank_state.OfRanks({}, {})
    _candidates: Candidates | None = None
    _opened: format.Opened | None = None
    _head: _Head
    _kept: dict[str, Tensor]
    _buffer: Tensor

    def __init__(
        self,
        group: Group,
        path: Location,
        seen: list[Seen],
        objects: Mapping[str, Any],
        everyones: Sequence[Needs],
    ) -> None:
        self._group, self._path, self._seen = group, path, seen
        self._objects, self._everyones = objects, everyones

    def next_head(self) -> _Head:
        """Open the next checkpoint that may be intact; return what all ranks are to know of it.

        Raises:
            CheckpointError: there are no more.
        """
        if self._candidates is None:
            wanted = rank_state.WithRanks(self._objects)
            self._candidates = candidates_at(self._path, self._seen, wanted)
        opened = self._candidates.open_next()
        if opened is None:
            raise CheckpointError(f"{KIND}: {self._path} holds no whole checkpoint")
        document, trees = rank_state.take_out(opened.document)
        in_common = {
            name for tree in (*document.state.values(), *document.rng) for name in tensor_names(tree)
        }
        entries = [entry for entry in opened.entries if entry.name in opened.wanted & in_common]
        names = frozenset(name for name in self._objects if all(name in needs for needs in self._everyones))
        keys = _keys_of_divided(opened, {name: self._objects[name] for name in names}, self._everyones[ROOT])
        self._opened, self.of_ranks = opened, rank_state.OfRanks(trees, {})
        self._head = _Head(
            opened.path,
            document,
            [entry for entry in entries if entry.name not in keys],
            [_Divided(entry, *keys[entry.name]) for entry in entries if entry.name in keys],
            names,
        )
        return self._head

    def close(self) -> None:
        """Close the file, if one is still open."""
        if self._opened is not None:
            self._opened.file.close()

    def make_room(self, empty: Allocate) -> None:
        """Make memory for what this rank alone has, and for the largest tensor that is divided."""
        if self._opened is None:
            return
        trees = [tree for ranks in self.of_ranks.trees.values() for tree in ranks.values()]
        names = {name for tree in trees for name in tensor_names(tree)} & self._opened.wanted
        self._kept = {e.name: empty(e.shape, e.dtype) for e in self._opened.entries if e.name in names}
        most = max((one.entry.nbytes for one in self._head.divided), default=0)
        self._buffer = torch.empty(most, dtype=torch.uint8)

    def read(self, common: Mapping[str, Tensor], buffers: Mapping[str, Tensor | LoadedPart]) -> None:
        """Read all tensors, and send the parts of those that are divided; see `_receive`.

        Args:
            common: memory for what all ranks get.
            buffers: memory for what this rank needs of the others.
        """
        divided = {one.entry.name: one for one in self._head.divided}
        opened = self._opened
        assert opened is not None
        self._kept |= common
        for entry in opened.entries:
            if entry.name in divided:
                whole = self._buffer[: entry.nbytes].view(entry.dtype).view(entry.shape)
                opened.read(entry, whole)
                self._hand_out(divided[entry.name], whole, buffers[entry.name])
            else:
                opened.read(entry, self._kept.get(entry.name))

    def _hand_out(self, one: _Divided, whole: Tensor, buffer: Tensor | LoadedPart) -> None:
        """Send each rank what it needs of a tensor, and copy what this one needs to its memory."""
        sent = []
        for rank, needs in enumerate(self._everyones):
            part = one.needed(needs)
            if rank == ROOT:
                for mine, found in zip(part.in_buffer(buffer), part.of(whole), strict=True):
                    mine.copy_(found)
            else:
                sent += [(rank, found) for found in part.of(whole) if found.numel()]
        works = [
            isend(format.bytes_of(found), self._group.ranks[rank], self._group, TAG) for rank, found in sent
        ]
        for work in works:
            work.wait()

    def is_intact(self) -> bool:
        """Return whether what was read is what was saved; False: the next one is to be tried.

        Raises:
            CheckpointDamaged, OSError: it is not, and there is no other one.
        """
        assert self._candidates is not None
        assert self._opened is not None
        self.of_ranks = self.of_ranks._replace(tensors=self._kept)
        return self._candidates.is_intact(self._opened, self._kept)


def _keys_of_divided(
    opened: format.Opened, objects: Mapping[str, Any], needs: Needs
) -> dict[str, tuple[str, Hashable]]:
    """Return which tensors are divided: of which object each is, and its key there.

    Args:
        opened: the checkpoint.
        objects: that the ranks divide.
        needs: of any rank: all have the same keys.
    """
    trees = [*opened.document.state.values(), *opened.document.rng]
    uses = Counter(name for tree in trees for name in tensor_names(tree))
    alike = {entry.name: torch.empty((), dtype=entry.dtype).expand(entry.shape) for entry in opened.entries}
    name_of = {id(tensor): name for name, tensor in alike.items()}
    found: dict[str, tuple[str, Hashable]] = {}
    for name, value in objects.items():
        try:
            keyed = list(_keyed(value, decode(opened.document.state[name], alike)))
        except WRONG_TREE:  # it does not fit, as all ranks find later
            continue
        for key, tensor in keyed:
            stored = name_of.get(id(tensor), "")
            if uses[stored] == 1 and tensor.nbytes >= LEAST_BYTES and key in needs[name]:
                found[stored] = (name, key)
    return found


def _keyed(value: Any, state: Any) -> Iterator[tuple[Hashable, Tensor]]:
    """Yield the tensors in an object's state, with the keys that they have in what ranks need of it."""
    if isinstance(value, nn.Module):
        keyed = list(state.items())
    else:
        saved = [index for group in state["param_groups"] for index in group["params"]]
        of_params = [(place, state["state"].get(index, {})) for place, index in enumerate(saved)]
        keyed = [(place, entry) for place, entries in of_params for entry in entries.values()]
    return ((key, tensor) for key, tensor in keyed if isinstance(tensor, Tensor))


# --- elsewhere ----------------------------------------------------------------------------------------


def _receive(
    group: Group, divided: Sequence[_Divided], needs: Needs, buffers: Mapping[str, Tensor | LoadedPart]
) -> None:
    """Receive what this rank needs of the tensors that are divided."""
    for one in divided:
        for part in one.needed(needs).in_buffer(buffers[one.entry.name]):
            if part.numel():
                irecv(format.bytes_of(part), group.ranks[ROOT], group, TAG).wait()
