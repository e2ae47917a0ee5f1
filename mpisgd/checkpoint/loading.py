"""`load` and `latest`: the first rank reads and checks the file, and broadcasts the objects asked for."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mpisgd.arguments import as_path, check_flag, has_state_dict, printable
from mpisgd.checkpoint import format, rank_state, rng_state
from mpisgd.checkpoint.newest import Found, newest_intact, newest_seen, read_whole
from mpisgd.checkpoint.serialization import WRONG_TREE, decode
from mpisgd.checkpoint.shared_errors import ROOT, agree, at_root
from mpisgd.checkpoint.storage import Location, as_location, find
from mpisgd.collectives.objects import Allocate
from mpisgd.core.consistency import Operation
from mpisgd.core.group import Group
from mpisgd.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch, InvalidArgument
from mpisgd.job.lifecycle import group_or_world
from mpisgd.optim.broadcast import broadcast_tensors, undo_casts
from mpisgd.sharding.offload.mapped_memory import MappedMemory
from mpisgd.sharding.offload.shared_errors import raised_on_every_rank

__all__ = ["Loaded", "latest", "load"]

MAX_LINES = 5  # of what does not fit


class Loaded(dict[str, Any]):
    """The plain values of a checkpoint, by name.

    Attributes:
        path: of the file, on the host of the first rank; a URL is a str.
        step: its number.
        ranks: the number of ranks that saved it.
    """

    def __init__(self, path: Path | str, step: int, ranks: int, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.path, self.step, self.ranks = path, step, ranks

    def __repr__(self) -> str:
        return f"Loaded({str(self.path)!r}, step={self.step}, ranks={self.ranks}, {super().__repr__()})"


def latest(folder: str | os.PathLike[str], *, group: Group | None = None) -> Path | str | None:
    """Return the newest intact checkpoint of a folder, the same on every rank; None if there is none.

    Collective. The first rank reads it and compares the checksums. It skips damaged files and prints a line
    on stderr for each. A missing folder has no checkpoint.

    Args:
        folder: as given to `save`.
        group: defaults to all processes of the job.

    Raises:
        CheckpointError: the folder cannot be read, or is not shared between the hosts; on every rank.
    """
    group, folder = group_or_world(group), as_location("checkpoint.latest", "folder", folder)
    seen = newest_seen(group, "checkpoint.latest", folder)

    def choose() -> Location | None:
        found = newest_intact(folder, seen or [], ())
        return None if found is None else found.path

    return at_root(group, Operation("checkpoint.latest", root=ROOT), choose)


def load(
    path: str | os.PathLike[str],
    *,
    rng: bool = True,
    group: Group | None = None,
    scratch: str | os.PathLike[str] | None = None,
    **objects: Any,
) -> Loaded:
    """Load a checkpoint into objects; return the plain values in it.

    Collective: all ranks of `group` call it with the same names. The first rank reads; the others need no
    access to the file. The number of ranks may differ from that at the save. Nothing in the file is executed.

    Args:
        path: a checkpoint, or a folder, of which the newest intact one is loaded; see `latest`. Or its URL,
            see `save`.
        rng: also restore the random number generators of each rank, if they were saved. Ranks without a saved
            state get generators that are seeded from the saved states and their rank.
        group: defaults to all processes of the job.
        scratch: a folder on a disk of each host, for a checkpoint that is larger than memory: the data lies
            in a private file there until the objects have loaded it.
        objects: by the name they were saved under; those left out are not loaded.

    Raises:
        InvalidArgument: something without `load_state_dict`; found locally, before anything is sent.
        CheckpointError: no such file, no intact one in the folder, or an object's `load_state_dict` raised;
            this and the next two on every rank.
        CheckpointDamaged: the file is damaged. Nothing was loaded.
        CheckpointMismatch: names, parameters or shapes are not those of the objects. Nothing was loaded.

    Cost: one broadcast of the loaded bytes, which are in memory twice during the load.
    """
    path = as_location("checkpoint.load", "path", path)
    check_flag("checkpoint.load", "rng", rng)
    folder = None if scratch is None else as_path("checkpoint.load", "scratch", scratch)
    for name, value in objects.items():
        if not has_state_dict(value):
            raise InvalidArgument(
                f"checkpoint.load: {name} is a {type(value).__name__}, without load_state_dict(); plain "
                "values are in what load returns"
            )
    group = group_or_world(group)
    empty = _memory(group, folder)
    found, of_ranks = _fetch(group, path, objects, empty)
    common, values, states = _decoded(found, objects)
    parts = _shares(group, found, of_ranks, common, objects)
    state, replicas = rank_state.give_back(group, parts, common, empty)
    problems = [line for name, value in objects.items() for line in _misfits(name, value, state[name])]
    problem = f"{found.path} does not fit: {'; '.join(problems)}" if problems else None
    agree(group, Operation("checkpoint.load", extra="fits"), problem, CheckpointMismatch)
    _fill(group, state, objects)
    rank_state.load_replicas(objects, replicas)
    if rng and states:
        rng_state.restore(states, group.rank)
    return Loaded(found.path, found.document.step, found.document.ranks, values)


# --- from the file to all ranks -----------------------------------------------------------------------


def _memory(group: Group, folder: Path | None) -> Allocate:
    """Return what makes memory for what is read. Collective where that is in files."""
    if folder is None:
        return lambda shape, dtype: torch.empty(shape, dtype=dtype)
    with raised_on_every_rank(group):
        return MappedMemory(folder, f"what rank {group.rank} loads").empty


def _fetch(
    group: Group, path: Location, objects: Mapping[str, Any], empty: Allocate
) -> tuple[Found, rank_state.OfRanks]:
    """Return the same checkpoint on every rank, and on the root what belongs to each of them. Collective."""
    seen = newest_seen(group, "checkpoint.load", path)
    here: dict[str, Tensor] = {}
    of_ranks = rank_state.OfRanks({}, {})

    def read() -> Found:
        """Read; tell the others of the tensors what is not their content."""
        nonlocal of_ranks
        found = _read(path, seen or [], objects, empty)
        found, of_ranks = rank_state.take_out(found)
        here.update(found.tensors)
        return found._replace(tensors={name: tensor.to("meta") for name, tensor in here.items()})

    asked = Operation("checkpoint.load", root=ROOT, extra=", ".join(objects))
    found = at_root(group, asked, read)
    # Not empty_like, which imports sympy where a tensor on the device "meta" gets memory.
    with raised_on_every_rank(group):
        tensors = here or {name: empty(meta.shape, meta.dtype) for name, meta in found.tensors.items()}
    broadcast_tensors([format.bytes_of(tensor) for tensor in tensors.values()], group.ranks[ROOT], group)
    return found._replace(tensors=tensors), of_ranks


def _read(path: Location, seen: list[Any], objects: Mapping[str, Any], empty: Allocate) -> Found:
    """Read the file, or the newest intact one of the folder. On the root."""
    wanted = rank_state.WithRanks(objects)
    storage, name = find(path)
    if name is not None:
        found: Found | None = read_whole(storage, name, wanted, empty)
    else:
        found = newest_intact(path, seen, wanted, empty)
    if found is None:
        raise CheckpointError(f"checkpoint.load: {path} holds no whole checkpoint")
    names = found.document.state
    missing = [name for name in objects if name not in names]
    if missing:
        has, lacks = ", ".join(_of_all(found)), ", ".join(missing)
        raise CheckpointMismatch(printable(f"checkpoint.load: {found.path} has no {lacks}; it has {has}"))
    values = [name for name in objects if found.document.kinds[name] == "value"]
    if values:
        raise CheckpointMismatch(
            f"checkpoint.load: {', '.join(values)} was saved as plain data: it is in what load returns"
        )
    return found


def _shares(
    group: Group,
    found: Found,
    of_ranks: rank_state.OfRanks,
    common: Mapping[str, Any],
    objects: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Return what each rank gets of what belongs to single ones, on the root. Collective."""
    parts: list[dict[str, Any]] = []
    problem = None
    try:
        parts = rank_state.shares(group, of_ranks, found.document.ranks, common, objects)
    except WRONG_TREE as exc:
        problem = printable(f"{found.path} is no checkpoint of mpisgd: {type(exc).__name__}, {exc}")
    agree(group, Operation("checkpoint.load", extra="own"), problem, CheckpointDamaged)
    return parts


def _of_all(found: Found) -> list[str]:
    """Return the names in a checkpoint, without those of what belongs to single ranks."""
    return [name for name, kind in found.document.kinds.items() if kind != rank_state.KIND]


def _decoded(found: Found, objects: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[Any]]:
    """Return the states of the objects, the plain values, and the generators of all ranks."""
    document, tensors = found.document, found.tensors
    values = [name for name, kind in document.kinds.items() if kind == "value"]
    try:
        return (
            {name: decode(document.state[name], tensors) for name in objects},
            {name: decode(document.state[name], tensors) for name in values},
            [decode(tree, tensors) for tree in document.rng],
        )
    except WRONG_TREE as exc:  # on every rank alike
        raise CheckpointDamaged(
            printable(f"{found.path} is no checkpoint of mpisgd: {type(exc).__name__}, {exc}")
        ) from exc


# --- from the state to the objects --------------------------------------------------------------------


def _misfits(name: str, value: Any, saved: Any) -> list[str]:
    if isinstance(value, nn.Module):
        if not isinstance(saved, dict):
            return [f"{name} is a {type(saved).__name__} in it, no state of a module"]
        lines = [printable(f"{name}.{line}") for line in _differences(saved, value.state_dict())]
        more = len(lines) - MAX_LINES
        return lines if more <= 0 else [*lines[:MAX_LINES], f"and {more} more"]
    if isinstance(value, torch.optim.Optimizer):
        try:
            theirs = [len(group["params"]) for group in saved["param_groups"]]
            saved["state"].items()
        except WRONG_TREE:
            return [f"{name} is no state of an optimizer in it"]
        ours = [len(group["params"]) for group in value.param_groups]
        return [f"{name} has {ours} parameters in its groups, not {theirs}"] if ours != theirs else []
    return []


def _differences(saved: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    lines = [f"{name} is not in it" for name in ours if name not in saved]
    lines += [f"{name} is not in the model" for name in saved if name not in ours]
    for name in ours:
        here, there = (getattr(state.get(name), "shape", None) for state in (ours, saved))
        if name in saved and here != there:
            lines.append(f"{name} is {_shape(here)}, not {_shape(there)} as in it")
    return lines


def _shape(shape: torch.Size | None) -> str:
    return "no tensor" if shape is None else str(list(shape))


def _fill(group: Group, state: Mapping[str, Any], objects: Mapping[str, Any]) -> None:
    """Load every object; raise on every rank if one `load_state_dict` raises. Collective."""
    problem = None
    for name, value in objects.items():
        try:
            value.load_state_dict(state[name])
            if isinstance(value, torch.optim.Optimizer):
                undo_casts(value, state[name]["state"])
        except Exception as exc:
            problem = f"{name}.load_state_dict() raised {type(exc).__name__}: {exc}"
            break
    agree(group, Operation("checkpoint.load", extra="loaded"), problem, CheckpointError)
