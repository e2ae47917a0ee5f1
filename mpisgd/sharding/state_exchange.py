"""The optimizer states of pieces travel: to every rank, or to the ranks that own these parts now."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mpisgd.accelerator.buffers import in_order
from mpisgd.collectives.objects import Allocate, allocate_tensors, extract_tensors
from mpisgd.core.consistency import Operation
from mpisgd.sharding.division import Member, PieceRange
from mpisgd.sharding.offload.state_store import StateStore
from mpisgd.sharding.owners import Owners
from mpisgd.sharding.piece import PieceState

__all__ = ["all_gather_outlines", "runs_of", "to_everyone", "to_owners"]


def to_everyone(
    mine: Sequence[PieceState], owners: Owners, store: StateStore, *, is_wanted: bool = True
) -> list[PieceState]:
    """Return the states of the pieces of all owners; [] where they are not wanted. Collective.

    Args:
        mine: of this rank's.
        owners: the ranks that divide everything.
        store: has room for what comes.
        is_wanted: whether this rank is to have them; others may say otherwise.

    Cost: every rank receives what the others own, see `Owners.exchange`; where some do not want it, each of
        the others receives it from its owners.
    """
    outline, tensors = _outlined(mine)
    told = all_gather_outlines((outline, is_wanted), owners)
    wanting = [owner for owner, (_, wants) in enumerate(told) if wants]
    empty = store.empty if is_wanted else _without_memory
    with store.shared_errors(owners.group):
        theirs = [
            (mine, tensors) if owner == owners.rank else _allocated(other, empty)
            for owner, (other, _) in enumerate(told)
        ]
    buffers = [tensors for _, tensors in theirs]

    def travel() -> None:
        if len(wanting) == owners.size:
            owners.exchange(buffers)
            return
        others = [(owner, rank) for owner, rank in enumerate(owners.ranks) if owner != owners.rank]
        owners.begin(
            [(rank, in_order(tensor)) for owner, rank in others if owner in wanting for tensor in tensors],
            [(rank, in_order(buffer)) for owner, rank in others if is_wanted for buffer in buffers[owner]],
        ).wait()

    owners.group.queue.run(_operation("state"), travel)
    return [state for states, _ in theirs for state in states] if is_wanted else []


def to_owners(
    held: Sequence[PieceState], owners: Owners, ranges: Sequence[Sequence[PieceRange]], store: StateStore
) -> list[PieceState]:
    """Return of the states that all ranks hold what this one owns. Collective.

    Args:
        held: of any parts, by this rank; every part is held by one.
        owners: the ranks that divide everything.
        ranges: what each of them owns.
        store: has room for what comes.

    Cost: what its owner does not hold travels once, to it.
    """
    outlines = all_gather_outlines(_outlined(held)[0], owners)
    found = _owned_by(ranges[owners.rank], held)
    others = [(owner, rank) for owner, rank in enumerate(owners.ranks) if owner != owners.rank]
    sends = [
        (rank, tensor) for owner, rank in others for tensor in _outlined(_owned_by(ranges[owner], held))[1]
    ]
    receives: list[tuple[int, Tensor]] = []
    with store.shared_errors(owners.group):
        for owner, rank in others:
            theirs, _ = _allocated(outlines[owner], _without_memory)
            outline, _ = _outlined(_owned_by(ranges[owners.rank], theirs))
            states, buffers = _allocated(outline, store.empty)
            found += states
            receives += [(rank, buffer) for buffer in buffers]
    owners.group.queue.run(
        _operation("parts"),
        lambda: owners.begin(
            [(rank, in_order(tensor)) for rank, tensor in sends],
            [(rank, in_order(buffer)) for rank, buffer in receives],
        ).wait(),
    )
    return found


def all_gather_outlines(mine: Any, owners: Owners) -> list[Any]:
    """Gather the outlines of each owner's states, without their tensors. Collective."""
    outlines: list[Any] = []
    operation = _operation("outline")
    owners.group.queue.run(operation, lambda: outlines.extend(owners.all_gather_object(mine)))
    return outlines


def _owned_by(ranges: Sequence[PieceRange], states: Iterable[PieceState]) -> list[PieceState]:
    """Return of these states what lies in ranges; what has no number for each element as it is."""
    runs = runs_of(member for range_ in ranges for member in range_.members)
    return [
        part
        for state in states
        for part in _cut(
            state, [run for run in runs.get(state.member.param, ()) if _overlap(state.member, run)]
        )
    ]


def runs_of(members: Iterable[Member]) -> dict[int, list[Member]]:
    """Return members by parameter, neighbours as one."""
    runs: dict[int, list[Member]] = {}
    for member in sorted(members):
        of_param = runs.setdefault(member.param, [])
        if of_param and _end(of_param[-1]) == member.first:
            of_param[-1] = of_param[-1]._replace(numel=_end(member) - of_param[-1].first)
        else:
            of_param.append(member)
    return runs


def _overlap(one: Member, other: Member) -> bool:
    is_empty = not one.numel and not other.numel  # of a parameter without elements
    return is_empty or max(one.first, other.first) < min(_end(one), _end(other))


def _end(member: Member) -> int:
    return member.first + member.numel


def _cut(state: PieceState, runs: Sequence[Member]) -> list[PieceState]:
    """Return the elements of runs of a state; that of a whole parameter stays whole."""
    if not state.cut:
        return [state] if runs else []
    param, start, _, _ = state.member
    parts = []
    for run in runs:
        first, end = max(start, run.first), min(_end(state.member), _end(run))
        cut = {key: value[first - start : end - start] for key, value in state.cut.items()}
        parts.append(PieceState(Member(param, first, end - first, 0), cut, state.kept))
    return parts


def _outlined(states: Sequence[PieceState]) -> tuple[Any, list[Tensor]]:
    """Return (an outline of states, the tensors in them)."""
    return extract_tensors([(tuple(state.member), state.cut, state.kept) for state in states])


def _allocated(outline: Any, empty: Allocate) -> tuple[list[PieceState], list[Tensor]]:
    """Return (the states of an outline, the tensors in them, to be filled)."""
    tree, tensors = allocate_tensors(outline, empty)
    return [PieceState(Member(*member), cut, kept) for member, cut, kept in tree], tensors


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor whose elements all lie in one place."""
    return torch.empty((), dtype=dtype).expand(shape)


def _operation(what: str) -> Operation:
    return Operation("shared parameters", extra=f"optimizer {what}")
