"""The optimizer state of divided parameters: each rank has that of its pieces, a checkpoint has all."""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from torch import Tensor

from mpisgd.accelerator.buffers import on_host
from mpisgd.core.group import Group
from mpisgd.errors import InvalidArgument
from mpisgd.gradients.fusion_buffer import StridedLayout
from mpisgd.sharding.division import Member, PieceRange
from mpisgd.sharding.needed_parts import LoadedPart, NeededPart, elements_of
from mpisgd.sharding.offload.state_store import StateInMemory, StateStore
from mpisgd.sharding.piece import (
    Entries,
    Piece,
    Pieces,
    PieceState,
    is_elementwise_entry,
    join_states,
)
from mpisgd.sharding.places import StatePlace
from mpisgd.sharding.state_exchange import all_gather_outlines, runs_of, to_everyone, to_owners

__all__ = ["PieceNames", "PieceStates"]

Ranges = Sequence[Sequence[PieceRange]]


class PieceNames:
    """Names the tensors of pieces after what lies in them, such as `weight[0:512]`.

    Args:
        parameters: the pieces.
        names: of all parameters.

    Attributes:
        names: as given; may grow at its end.
    """

    def __init__(self, parameters: Pieces, names: Sequence[str]) -> None:
        self._parameters, self.names = parameters, list(names)
        self._known: dict[Tensor, str] = {}

    def __call__(self, tensor: Tensor) -> str:
        """Return the name of a piece."""
        if tensor not in self._known:
            self._known = {piece.tensor: piece.name(self.names) for piece in self._parameters.pieces}
        return self._known.get(tensor, f"piece {len(self._known)}")


class PieceStates:
    """What an optimizer keeps for the pieces of this rank, and how it becomes that of parameters and back.

    Args:
        params: all parameters.
        parameters: the pieces, and which rank owns what.
        group: the ranks that train together.
        state: where it is kept; in memory by default.

    Attributes:
        params: as given; may grow at its end.
        parameters: as given.
        state: what the optimizer has as its `state` during a step.
        where: the state is between steps; the caller moves it where one is loaded.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        parameters: Pieces,
        group: Group,
        state: StateStore | None = None,
    ) -> None:
        self.parameters = parameters
        self.state: StateStore = StateInMemory() if state is None else state
        self.params = params
        self.where = StatePlace.WHOLE
        self._group = group

    def split(self, present: Sequence[bool]) -> None:
        """Split pieces of which some parameters have a gradient and some have none.

        Args:
            present: whether there is one, for each parameter.
        """
        if all(present) or not any(present):
            return
        pieces = []
        for piece in self.parameters.pieces:
            parts = piece.split([present[member.param] for member in piece.members])
            pieces += parts
            if len(parts) > 1:
                with self.state.held_errors():  # the pieces of other ranks may not be split
                    self._split_state(piece, parts)
        self.parameters.pieces = pieces

    def _split_state(self, piece: Piece, parts: Sequence[Piece]) -> None:
        if piece.tensor in self.state:
            entries = self.state.pop(piece.tensor)
            self.state.update({part.tensor: piece.cut_entries(entries, part) for part in parts})

    def take_along(self, divide: Callable[[], Ranges]) -> None:
        """Take the state along into other pieces; `divide` makes these, and returns what each owner has then.

        Collective.
        """
        mine, others = self._mine_now(), self.others
        parts = to_owners(mine, self.parameters.owners, divide(), self.state)
        with self.state.shared_errors(self._group):
            self.cut(self.join(parts), others)

    def mine(self, read: Callable[[Tensor], Entries]) -> list[PieceState]:
        """Return the bytes of the state of this rank's pieces, masters included, in host memory.

        Args:
            read: returns the entries of a piece's tensor, {} where there are none.
        """
        found = [(p, _on_host(p.with_master(read(p.tensor)))) for p in self.parameters.pieces]
        return [part for piece, entries in found if entries for part in piece.states(entries)]

    def _mine_of(self, wholes: Mapping[int, Entries]) -> list[PieceState]:
        """Return the same of the states of whole parameters, which this rank has."""
        return [
            part
            for piece in self.parameters.pieces
            for master in piece.states(_on_host(piece.with_master({})))
            if (part := self._part_of(wholes, piece, master)).cut or part.kept
        ]

    def _part_of(self, wholes: Mapping[int, Entries], piece: Piece, master: PieceState) -> PieceState:
        """Return a piece's part of the state of a parameter, with its master if that has none."""
        member = master.member
        entries = _on_host(wholes.get(member.param, {}))
        if piece.layout is not None:
            return PieceState(member, {}, _with_missing(entries, master.kept))
        part = _cut(member, entries, self.params[member.param].shape, self.parameters.layouts[member.param])
        return PieceState(member, _with_missing(part.cut, master.cut), part.kept)

    def gather(
        self, wholes: Mapping[int, Entries] | None = None, *, is_wanted: bool = True
    ) -> dict[int, dict[str, Any]]:
        """Return the states of all parameters, put together from everyone's pieces. Collective.

        Args:
            wholes: what this rank has instead, where a state was loaded that is whole.
            is_wanted: whether this rank is to have them; otherwise {} is returned.
        """
        mine = self._mine_now(wholes)
        everyones = to_everyone(mine, self.parameters.owners, self.state, is_wanted=is_wanted)
        with self.state.shared_errors(self._group):
            return self.join(everyones)

    def _mine_now(self, wholes: Mapping[int, Entries] | None = None) -> list[PieceState]:
        """Return the states of this rank's pieces, or their parts of `wholes`. Collective."""
        with self.state.shared_errors(self._group):
            mine = self.mine(self.state.read) if wholes is None else self._mine_of(wholes)
            self.state.end_step()
        return mine

    def join(self, everyones: Sequence[PieceState]) -> dict[int, dict[str, Any]]:
        """Return the states of all parameters, put together from those of all pieces."""
        parts: dict[int, list[PieceState]] = defaultdict(list)
        for state in everyones:
            parts[state.member.param].append(state)
        wholes = {}
        for index in sorted(parts):  # in the same order on every rank
            in_order = sorted(parts[index], key=lambda part: part.member.first)
            wholes[index] = join_states(in_order, self.parameters.layouts[index], self.state.empty)
        return wholes

    def cut(self, wholes: Mapping[int, Entries], others: Mapping[Any, Any] | None = None) -> None:
        """Take over this rank's part of the states of whole parameters.

        Args:
            wholes: the states, by parameter; some may have none.
            others: what belongs to no parameter.
        """
        shapes = [param.shape for param in self.params]
        layouts, pieces = self.parameters.layouts, []
        self.state.clear()
        for piece, entries in _cut_states(self.parameters.pieces, wholes, shapes, layouts):
            pieces.append(piece)
            if entries:
                self.state[piece.tensor] = self.parameters.placed(piece, entries)
        self.parameters.pieces = pieces
        self.state.update(others or {})

    def wholes_in(self, state: Mapping[Any, Any]) -> dict[int, Entries]:
        """Return the states of parameters that an optimizer has, by their places."""
        return {index: state[param] for index, param in enumerate(self.params) if param in state}

    def take_over(self, state: MutableMapping[Any, Any]) -> None:
        """Take this rank's part of the state if it is whole, and leave the optimizer none.

        Errors of the store are held: other ranks may have taken their parts already.
        """
        if self.where is StatePlace.WHOLE:
            others = {key: value for key, value in state.items() if not isinstance(key, Tensor)}
            with self.state.held_errors():
                self.take_parts(self.wholes_in(state), others)
            _empty(state)

    def take_parts(self, wholes: Mapping[int, Entries], others: Mapping[Any, Any]) -> None:
        """Take this rank's part of these states; see `cut`."""
        self.where = self.where.to(StatePlace.PIECES)
        self.cut(wholes, others)

    def loaded(self) -> None:
        """Note that the optimizer has the states of all parameters."""
        self.where = self.where.to(StatePlace.WHOLE)

    def needed_parts(self) -> dict[int, NeededPart]:
        """Return the parts that this rank needs of each parameter's state that is loaded."""
        pieces, layouts = self.parameters.pieces, self.parameters.layouts
        runs = runs_of(member for piece in pieces for member in piece.members)
        return {i: NeededPart.by_members(layout, runs.get(i, ())) for i, layout in enumerate(layouts)}

    def lend(self) -> StateStore:
        """Return the state that the optimizer is given during a step; see `take_back`."""
        self.where = self.where.to(StatePlace.STEP)
        return self.state

    def take_back(self) -> None:
        """Note that a step is over."""
        if self.where is StatePlace.STEP:
            self.where = self.where.to(StatePlace.PIECES)

    @contextlib.contextmanager
    def shown_in(self, state: MutableMapping[Any, Any], wholes: Mapping[int, Entries]) -> Iterator[None]:
        """Let the optimizer have these states of parameters, and what else is kept, inside."""
        state.update({self.params[index]: whole for index, whole in wholes.items()})
        state.update(self.others)
        try:
            yield
        finally:
            _empty(state)

    def place(self, state: dict[Any, Any]) -> None:
        """Bring the state of parameters, where these are the pieces, to where they lie."""
        for piece in self.parameters.pieces:
            if piece.tensor in state:
                state[piece.tensor] = self.parameters.placed(piece, state[piece.tensor])

    def to_shard(self, state: StateStore) -> dict[str, Any]:
        """Return `state`, that of this rank's pieces, as plain data that says where each part belongs."""
        mine, owners = self.mine(state.read), self.parameters.owners
        state.end_step()
        return {
            "owner": owners.rank,
            "num_owners": owners.size,
            "parts": [{**part.member._asdict(), "cut": part.cut, "kept": part.kept} for part in mine],
            "others": {key: state[key] for key in state if not isinstance(key, Tensor)},
        }

    def from_shards(
        self, shards: Sequence[Mapping[str, Any]], ranges: Ranges | None = None
    ) -> tuple[dict[int, dict[str, Any]], Mapping[str, Any]]:
        """Return the states of the parameters that this rank has parts of, and a shard without its parts.

        What other ranks own of these parameters may be anything.

        Args:
            shards: what `to_shard` has returned on all ranks of a run, however many these were.
            ranges: what each owner has, where each rank gives those that it holds, and each shard is held by
                one of them; collective then.

        Raises:
            InvalidArgument: those of some ranks are missing; on all ranks if they are given so.
        """
        owners, parts = self.parameters.owners, _parts_of(shards)
        heads = [{key: value for key, value in shard.items() if key != "parts"} for shard in shards]
        if ranges is not None:
            heads = [head for of_one in all_gather_outlines(heads, owners) for head in of_one]
        _check_complete(heads)
        if ranges is not None:
            return self.join(to_owners(parts, owners, ranges, self.state)), heads[0]
        needed = {member.param for piece in self.parameters.pieces for member in piece.members}
        found = {part.member[:2]: part for part in parts if part.member.param in needed}
        return self.join(list(found.values())), heads[0]  # hosts may have had the same

    @property
    def others(self) -> dict[Any, Any]:
        """What belongs to no parameter."""
        return {key: self.state[key] for key in self.state if not isinstance(key, Tensor)}


def _empty(state: MutableMapping[Any, Any]) -> None:
    for key in list(state):
        del state[key]


def _with_missing(entries: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries, in their order, and behind them those of `others` that are not among them."""
    return {**entries, **{key: value for key, value in others.items() if key not in entries}}


def _on_host(entries: Entries) -> Entries:
    return {key: on_host(value) if isinstance(value, Tensor) else value for key, value in entries.items()}


def _parts_of(shards: Sequence[Mapping[str, Any]]) -> list[PieceState]:
    """Return the states in what `to_shard` has returned."""
    return [
        PieceState(Member(*(part[field] for field in Member._fields)), part["cut"], part["kept"])
        for shard in shards
        for part in shard["parts"]
    ]


def _check_complete(shards: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidArgument unless these are the shards of all owners of one run; hosts may have the same."""
    given = sorted({shard["owner"] for shard in shards})
    sizes = sorted({shard["num_owners"] for shard in shards})
    if len(sizes) != 1 or given != list(range(sizes[0])):
        raise InvalidArgument(
            f"load_shard_state_dicts: the shards are those of ranks {given}, of runs on {sizes} ranks; pass "
            "those of all ranks of one run"
        )


def _cut_states(
    pieces: Sequence[Piece],
    whole: Mapping[int, Entries],
    shapes: Sequence[Any],
    layouts: Sequence[StridedLayout],
) -> Iterator[tuple[Piece, dict[str, Any]]]:
    """Yield the pieces, and the state of each, of the states of whole parameters.

    Where these say different things, as after unequal numbers of steps, pieces are split.

    Args:
        pieces: of this rank.
        whole: the states, by parameter; some may have none. They may be `LoadedPart`s of what is needed.
        shapes: of all parameters.
        layouts: of all parameters.
    """
    for piece in pieces:
        if piece.layout is not None:
            entries = whole.get(piece.members[0].param, {})
            yield piece, piece.without_master({key: _as_tensor(value) for key, value in entries.items()})
            continue
        for part in piece.split([_what_is_kept(whole.get(m.param), shapes[m.param]) for m in piece.members]):
            own: dict[str, Any] = {}
            if part.members[0].param in whole:
                cut = [_cut(m, whole[m.param], shapes[m.param], layouts[m.param]) for m in part.members]
                own = part.without_master(part.joined(cut))
            yield part, own


def _as_tensor(value: Any) -> Any:
    return value.whole() if isinstance(value, LoadedPart) else value


def _what_is_kept(entries: Entries | None, shape: Any) -> str:
    """Return a key that parameters which are updated as one have in common."""
    if entries is None:
        return "none"
    cut = sorted(k for k, v in entries.items() if is_elementwise_entry(k, v, shape))
    kept = {k: v.tolist() if isinstance(v, Tensor) else v for k, v in entries.items() if k not in cut}
    return repr((cut, sorted(kept.items())))


def _cut(member: Member, entries: Entries, shape: Any, layout: StridedLayout) -> PieceState:
    """Return the state of a part of a parameter."""
    cut = {
        key: elements_of(value, layout, member.first, member.numel)
        for key, value in entries.items()
        if is_elementwise_entry(key, value, shape)
    }
    return PieceState(member, cut, {key: value for key, value in entries.items() if key not in cut})
